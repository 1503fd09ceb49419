"""Autocast belongs to the call of backward(): inside of a block, outside, and with a graph break inside of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def without(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return x @ w


def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).float().tanh() @ w.exp()


def inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        y = x @ w
    return y.float() @ w


def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        if x.sum() > -1e9:
            x = x * 2
    return x @ w


def broken_between(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        y = (x @ w).float()
        if y.sum() > -1e9:
            with torch.autocast("cpu", enabled=False):
                y = y @ w
        if y.sum() > -1e9:
            y = y * 2
    return y @ w


def step(program: Program, x: torch.Tensor, w: torch.Tensor, forward: bool, backward: bool, order: int) -> list[Any]:
    with torch.autocast("cpu", enabled=forward):
        result = program(x, w)
    with torch.autocast("cpu", enabled=backward):
        found = torch.autograd.grad(result.square().sum(), (x, w), create_graph=order > 1)
        if order > 1:
            found += torch.autograd.grad(sum(item.square().sum() for item in found), (x, w))
    return [result, *found]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("program", [product, without, mixed, inside, broken, broken_between])
@pytest.mark.sampled(10)
def test_gradients_are_those_of_eager(program: Program, forward: bool, backward: bool, order: int) -> None:
    compiled = dovetail.compile(program, backend="aten")
    for seed in range(3):
        torch.manual_seed(seed)
        x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        expected = step(program, x, w, forward, backward, order)
        actual = step(compiled, x, w, forward, backward, order)
        # Sums of several gradients in half precision are taken in another order in a second derivative, and where parts of the
        # program convert the same weight one by one.
        exact = order == 1 and program is not broken_between
        for one, other in zip(expected, actual, strict=True):
            assert one.dtype == other.dtype
            tolerance = 0.0 if exact else 0.02 * float(one.detach().abs().max())
            torch.testing.assert_close(other, one, rtol=0.0, atol=tolerance)


def test_the_graph_is_freed_as_ever() -> None:
    compiled = dovetail.compile(product, backend="aten", fullgraph=True)
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    result = compiled(x, w).sum()
    with torch.autocast("cpu"):
        (first,) = torch.autograd.grad(result, w, retain_graph=True)
        (second,) = torch.autograd.grad(result, w)
    assert torch.equal(first, second)
    assert not first.requires_grad
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(result, w)


def test_compiled_autograd_says_what_it_cannot_do() -> None:
    compiled = dovetail.compile(product, backend="aten", fullgraph=True)
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    (expected,) = torch.autograd.grad(product(x, w).sum(), w)
    with dovetail.compiled_autograd(backend="aten"):
        (found,) = torch.autograd.grad(compiled(x, w).sum(), w)
    assert torch.equal(found, expected)
    with torch.autocast("cpu"):
        (expected,) = torch.autograd.grad(product(x, w).sum(), w)
        with dovetail.compiled_autograd(backend="aten"):
            (found,) = torch.autograd.grad(compiled(x, w).sum(), w)
    assert torch.equal(found, expected)


_library = torch.library.Library("dovetail_autocast", "FRAGMENT")
_library.define("own(Tensor x) -> Tensor")
_library.impl("own", torch.clone, "CompositeExplicitAutograd")
_library.impl("own", lambda x: x + 1, "AutocastCPU")


class Own(torch.autograd.Function):
    """Its backward calls an operator that autocast replaces by another program."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * torch.ops.dovetail_autocast.own(ctx.saved_tensors[0])


class OfTangent(Own):
    """The same, of the gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.ops.dovetail_autocast.own(gradient) * 2


class OfSaved(Own):
    """Its backward multiplies what the forward has saved, for which no gradient is needed."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (x @ x).float()


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("function", [Own, OfTangent, OfSaved])
@pytest.mark.sampled(4)
def test_custom_backwards(function: Any, forward: bool, backend: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return function.apply(x.sin()).cos()  # type: ignore[no-any-return]

    compiled = dovetail.compile(program, backend=backend, fullgraph=True)
    tolerance = 0.0 if backend == "aten" else 1e-5
    for backward in (False, True, False):
        for order in (1, 2) if function is OfSaved and backend == "aten" else (1,):
            found = []
            for run in (program, compiled):
                x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
                with torch.autocast("cpu", enabled=forward):
                    result = run(x)
                with torch.autocast("cpu", enabled=backward):
                    (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=order > 1)
                    if order > 1:
                        (gradient,) = torch.autograd.grad(gradient.square().sum(), x)
                found.append(gradient)
            torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)
