"""Hooks and custom backwards that are not linear in their gradient, under second derivatives: right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-0.5, 0.5)


class Shifted(Clipped):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 1


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return -(gradient * x.exp() * (1 + x)).view(-1).flip(0).flip(0).view(x.shape).neg()


def by_hook(hook: Any) -> Any:
    def program(x: torch.Tensor) -> torch.Tensor:
        inner = x.sin()
        inner.register_hook(hook)
        return inner.exp() * x

    return program


def by_function(kind: Any) -> Any:
    return lambda x: kind.apply(x.sin()).exp() * x


def _second(function: Any, reads_values: bool) -> torch.Tensor:
    x = torch.linspace(0.2, 2, 4, dtype=torch.float64).requires_grad_()
    value = function(x)
    (first,) = torch.autograd.grad((value.square() if reads_values else value).sum(), x, create_graph=True)
    first.square().sum().backward()
    assert x.grad is not None
    return x.grad


LINEAR = {
    "function": by_function(Linear),
    "hook": by_hook(lambda g: g * 2),
    "hook that fills": by_hook(lambda g: g.masked_fill(torch.tensor([True, False, True, False]), 0.0) - 0.5 * g),
    "hook with a mask": by_hook(lambda g: torch.where(torch.tensor([True, False, True, False]), g, 0 * g)),
}
OTHERS = {
    "function": by_function(Clipped),
    "shift": by_function(Shifted),
    "hook": by_hook(lambda g: g.clamp(-0.5, 0.5)),
    "square": by_hook(lambda g: g * g),
    "fill": by_hook(lambda g: g.masked_fill(g.detach() > 0, 1)),
    "norm": by_hook(lambda g: g / g.norm()),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_done_to_each_summand(name: str) -> None:
    for reads_values in (True, False):
        compiled = dovetail.compile(LINEAR[name], backend="aten")
        torch.testing.assert_close(_second(compiled, reads_values), _second(LINEAR[name], reads_values))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_linear_is_refused_where_the_gradient_arrives_in_two_parts(name: str) -> None:
    compiled = dovetail.compile(OTHERS[name], backend="aten")
    torch.testing.assert_close(_second(compiled, False), _second(OTHERS[name], False))
    with pytest.raises(dovetail.errors.HigherOrderGradientError, match="not linear in its gradient"):
        _second(compiled, True)


@pytest.mark.parametrize("name", OTHERS)
def test_first_derivatives_are_eagers(name: str) -> None:
    gradients = []
    for function in (OTHERS[name], dovetail.compile(OTHERS[name], backend="aten", fullgraph=True)):
        x = torch.linspace(0.2, 2, 4).requires_grad_()
        for _ in range(2):
            function(x).square().sum().backward()
        gradients.append(x.grad)
    same(*gradients)
