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


def _placed(g: torch.Tensor) -> torch.Tensor:
    """The gradient in the middle of zeros, with a part of it taken back."""
    room = g.new_zeros(6)
    room[1:5] = g
    room[5] = g.sum()
    return room[1:5] + room[5]


LINEAR |= {
    "hook that pads": by_hook(lambda g: torch.cat([g.new_zeros(1), g, torch.zeros_like(g)])[1:5]),
    "hook that writes to zeros": by_hook(_placed),
    "hook that adds at places": by_hook(lambda g: g.new_zeros(4).index_add(0, torch.tensor([0, 1, 1, 3]), g)),
    "hook that scatters": by_hook(lambda g: g.new_zeros(4).scatter_add(0, torch.tensor([0, 1, 1, 3]), g)),
    "hook that puts": by_hook(lambda g: g.new_zeros(4).index_put((torch.tensor([3, 1, 0, 2]),), g)),
}
OTHERS = {
    "pad with ones": by_hook(lambda g: torch.cat([g.new_ones(1), g[1:]])),
    "put ones": by_hook(lambda g: g.index_put((torch.tensor([1]),), g.new_ones(1))),
    "places by value": by_hook(lambda g: g.new_zeros(4).index_put((g.argsort(),), g)),
    "function": by_function(Clipped),
    "shift": by_function(Shifted),
    "hook": by_hook(lambda g: g.clamp(-0.5, 0.5)),
    "square": by_hook(lambda g: g * g),
    "fill": by_hook(lambda g: g.masked_fill(g.detach() > 0, 1)),
    "norm": by_hook(lambda g: g / g.norm()),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_done_to_each_summand(name: str) -> None:
    for reads_values in (True, False):
        compiled = dovetail.compile(LINEAR[name], backend="aten")
        torch.testing.assert_close(_second(compiled, reads_values), _second(LINEAR[name], reads_values))


@pytest.mark.sampled(2)
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


class OfOneGradient(torch.autograd.Function):
    """Two results, one of which is saved; the backward reads the gradient of the other only, and is not linear in it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slope = x.square()
        ctx.save_for_backward(slope)
        return x * 2, slope

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
        (slope,) = ctx.saved_tensors
        return gradient * slope + slope


class OfBothGradients(OfOneGradient):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        (slope,) = ctx.saved_tensors
        return (gradient * slope + other).clamp(-0.5, 0.5)


class LinearInOne(OfOneGradient):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
        (slope,) = ctx.saved_tensors
        return gradient * slope * 3


def _derivative_of_slope(program: Any, create_graph: bool) -> torch.Tensor:
    x = torch.linspace(0.2, 2, 4, dtype=torch.float64).requires_grad_()
    loss = sum(result.sin().sum() for result in program(x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (found,) = torch.autograd.grad(slope.cos().sum(), x, create_graph=create_graph)
    return found.detach()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("function", [OfOneGradient, OfBothGradients, LinearInOne])
def test_some_gradients_of_a_function_and_orders_after_the_second(function: Any, create_graph: bool) -> None:
    def program(x: torch.Tensor) -> Any:
        return function.apply(x)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    if function is LinearInOne:
        torch.testing.assert_close(
            _derivative_of_slope(compiled, create_graph), _derivative_of_slope(program, create_graph)
        )
        return
    with pytest.raises(dovetail.errors.HigherOrderGradientError, match="not linear in its gradient"):
        _derivative_of_slope(compiled, create_graph)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OTHERS)
def test_a_third_order_is_refused_too(name: str) -> None:
    x = torch.linspace(0.2, 2, 4).requires_grad_()
    value = dovetail.compile(OTHERS[name], backend="aten")(x)
    (first,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
    with pytest.raises(dovetail.errors.HigherOrderGradientError, match="not linear in its gradient"):
        torch.autograd.grad(first.square().sum(), x, create_graph=True)


class LinearInBoth(OfOneGradient):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        (slope,) = ctx.saved_tensors
        return gradient * slope + other * 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", [OfOneGradient, OfBothGradients, LinearInBoth])
def test_compiled_autograd_refuses_the_same(function: Any) -> None:
    def program(x: torch.Tensor) -> Any:
        return function.apply(x)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for create_graph in (False, True):
        with dovetail.compiled_autograd(backend="aten") as backwards:
            if function is LinearInBoth:
                found = _derivative_of_slope(compiled, create_graph)
                torch.testing.assert_close(found, _derivative_of_slope(program, create_graph))
                assert backwards.runs
                continue
            with pytest.raises(dovetail.errors.HigherOrderGradientError, match="not linear in its gradient"):
                _derivative_of_slope(compiled, create_graph)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["function", "hook", "norm"])
def test_one_captured_backward_is_not_for_parts_too(name: str) -> None:
    compiled = dovetail.compile(OTHERS[name], backend="aten")
    x = torch.linspace(0.2, 2, 4).requires_grad_()
    with dovetail.compiled_autograd(backend="aten"):
        compiled(x).square().sum().backward()
        value = compiled(x)
        (first,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
        with pytest.raises(dovetail.errors.HigherOrderGradientError, match="not linear in its gradient"):
            first.square().sum().backward()
