"""Derivatives of any order through functions that use ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func

import dovetail
from dovetail.errors import GraphBreakWarning, HigherOrderGradientError
from tests.differential import same


class Tripled(torch.autograd.Function):
    """Its derivative is not that of its operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3 * ctx.saved_tensors[0]


MODEL = torch.nn.Sequential(
    torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
).double()
PARAMETERS = dict(MODEL.named_parameters())


def energy(row: torch.Tensor) -> torch.Tensor:
    return func.functional_call(MODEL, PARAMETERS, (row,)).sum()


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        slope = func.grad(lambda y: (y**3).sum())(x)
    return (x.sin() * slope).sum()


def without_gradients_inside(x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = y.exp()
        return (y * scale).sum()

    return (func.grad(inner)(x) * x).sum()


RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vmap": lambda x: func.vmap(lambda row: row.sin() * row)(x).sum(),
    "grad": lambda x: (func.grad(lambda y: (y**3).sum())(x) * x.exp()).sum(),
    "jvp": lambda x: func.jvp(lambda y: y**3 * y.cos(), (x,), (torch.ones_like(x),))[1].sum(),
    "jacobian": lambda x: func.jacrev(lambda y: (y**3).sum(0))(x).square().sum(),
    "gradients of rows": lambda x: func.vmap(func.grad(lambda row: (row.sin() * row).sum()))(x).square().sum(),
    "model": lambda x: func.vmap(energy)(x).square().sum(),
    "in place": lambda x: func.vmap(lambda row: (row * 1).mul_(row).sin_())(x).sum(),
}
REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detached": lambda x: func.vmap(lambda row: row.sin() * row.detach())(x).sum(),
    "detached outside": lambda x: (func.vmap(torch.sin)(x) * x.detach()).sum(),
    "data": lambda x: (func.vmap(torch.sin)(x) * x.data).sum(),
    "without gradients": without_gradients,
    "without gradients inside": without_gradients_inside,
    "kept whole": lambda x: func.vmap(torch.exp)(x).prod(),
    "kept whole, one element": lambda x: func.vmap(torch.exp)(x).max(),
    "a formula of its own": lambda x: (Tripled.apply(x) * func.vmap(torch.sin)(x)).sum(),
    "factors": lambda x: func.vmap(lambda row: torch.linalg.det(torch.outer(row, row) + torch.eye(2).double()))(
        x
    ).sum(),
}


def rows() -> torch.Tensor:
    return torch.linspace(0.2, 1.3, 6, dtype=torch.float64).view(3, 2).requires_grad_()


def derivatives(function: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    x, scale = rows(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(function(x), x, scale, create_graph=True)
    return [first.detach(), *torch.autograd.grad((first * first.cos()).sum(), [x, scale], allow_unused=True)]


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.sampled(4)
def test_second_derivatives_through_transforms(name: str) -> None:
    compiled = dovetail.compile(RIGHT[name], backend="aten")
    expected = derivatives(RIGHT[name])
    for _ in range(2):
        same(expected, derivatives(compiled), exact=False)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sampled(2)
def test_what_its_operators_do_not_say_is_refused(name: str) -> None:
    """To take the derivative of the operators would be wrong in silence."""
    compiled = dovetail.compile(REFUSED[name], backend="aten")
    x = rows()
    (first,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    same(torch.autograd.grad(REFUSED[name](x), x), (first.detach(),), exact=False)
    with pytest.raises(HigherOrderGradientError, match=r"uses torch\.func|have no derivative"):
        torch.autograd.grad(first.square().sum(), x)


def test_linearize_breaks_the_graph() -> None:
    """It traces the function by itself, and gave a fake tensor."""

    def program(x: torch.Tensor) -> torch.Tensor:
        value, push = func.linearize(torch.sin, x)
        return value + push(x)

    compiled = dovetail.compile(program, backend="aten")
    with pytest.warns(GraphBreakWarning, match="linearize"):
        same(program(rows()), compiled(rows()))
