"""Derivatives of higher orders of programs whose sizes are made of data: other data, other sizes, eager's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail

Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def means_of_groups(x: Tensor, groups: Tensor, w: Tensor) -> Tensor:
    counts = torch.bincount(groups)
    means = torch.zeros(counts.shape[0], 3, dtype=x.dtype).index_add(0, groups, (x @ w).tanh())
    means = means / counts[:, None].clamp(min=1)
    return (x - means.repeat_interleave(counts, 0)) ** 3


def sums_of_groups(x: Tensor, groups: Tensor, w: Tensor) -> Tensor:
    found, places, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    return (torch.zeros(found.shape[0], 3, dtype=x.dtype).index_add(0, places, x.sin() @ w) / counts[:, None])[
        places
    ] * x


def a_linear_function_of_groups(x: Tensor, groups: Tensor, w: Tensor) -> Tensor:
    found, places = torch.unique(groups, return_inverse=True)
    return torch.zeros(found.shape[0], 3, dtype=x.dtype).index_add(0, places, x @ w)


def a_mask(x: Tensor, groups: Tensor, w: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result[groups > 0] = (x[groups > 0] @ w).sin()
    return result * x


def a_linear_mask(x: Tensor, groups: Tensor, w: Tensor) -> Tensor:
    return (x @ w)[groups > 0]


def a_number(x: Tensor, groups: Tensor, w: Tensor) -> Tensor:
    count = groups.max().item()
    return torch.zeros(2 * count + 1, 3, dtype=x.dtype).index_add(0, 2 * groups, x.sin() @ w) ** 2


def a_size_less_another(x: Tensor, groups: Tensor, w: Tensor) -> Tensor:
    count = groups.nonzero().shape[0]
    return (x[: x.shape[0] - count + 1] @ w).exp()


PROGRAMS = [means_of_groups, sums_of_groups, a_linear_function_of_groups, a_mask, a_linear_mask, a_size_less_another]


def _inputs(call: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(call)
    rows = (6, 6, 9, 4)[call]
    x, w = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((rows, 3), (3, 3)))
    groups = torch.sort(torch.randint(0, 4, (rows,), generator=generator)).values
    groups[-1] = 3
    return x.requires_grad_(), groups, w.requires_grad_()


def _orders(program: Program, call: int, orders: int) -> list[Any]:
    x, groups, w = _inputs(call)
    total = (program(x, groups, w) ** 2).sum()
    found: list[Any] = [total.detach()]
    for _ in range(orders):
        slopes = torch.autograd.grad(total, (x, w), create_graph=True, allow_unused=True, materialize_grads=True)
        found += [item.detach() for item in slopes]
        total = sum((item * item.detach().cos()).sum() for item in slopes)  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("program", [a_number, *(pytest.param(item, marks=pytest.mark.slow) for item in PROGRAMS)])
def test_as_eager(program: Program) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for call in (0, 2, 3):
        torch.testing.assert_close(_orders(compiled, call, 2), _orders(program, call, 2))


@pytest.mark.slow
@pytest.mark.parametrize("program", [a_linear_mask, a_linear_function_of_groups])
def test_third_order(program: Program) -> None:
    compiled = dovetail.compile(program, backend="aten")
    torch.testing.assert_close(_orders(compiled, 0, 3), _orders(program, 0, 3))


def test_eager_runs_the_programs_calls_with_the_sizes_of_the_moment(monkeypatch: Any) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no derivative today")

    monkeypatch.setattr("dovetail.higher_order.capture.capture_backward", fails)
    compiled = dovetail.compile(means_of_groups, backend="aten", fullgraph=True)
    with pytest.warns(dovetail.errors.EagerFallbackWarning, match="no derivative today"):
        for call in (0, 2):
            torch.testing.assert_close(_orders(compiled, call, 2), _orders(means_of_groups, call, 2))


@pytest.mark.parametrize("norm", [torch.nn.GroupNorm(2, 4), torch.nn.LayerNorm(6), torch.nn.InstanceNorm1d(4)])
def test_gradients_that_cancel_out(norm: torch.nn.Module) -> None:
    """Their first order differs from the captured one by rounding of what cancels out."""

    def program(x: Tensor) -> Tensor:
        return norm(x) ** 2

    compiled = dovetail.compile(program, backend="aten")
    found = []
    for function in (program, compiled):
        x = torch.linspace(-1, 1, 48).view(2, 4, 6).requires_grad_()
        (slope,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.pow(2).sum(), x)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
