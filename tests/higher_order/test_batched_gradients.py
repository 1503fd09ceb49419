"""Batched gradients (``is_grads_batched=True``) of compiled functions that are differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import HigherOrderGradientError

Tensor = torch.Tensor
jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian


def cubes(x: Tensor) -> Tensor:
    return x.pow(3) * x.sum()


def dropped(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x.exp() * x, 0.5)


def pair(x: Tensor) -> Tensor:
    return TwoResults.apply(x * 1)[0]


class TwoResults(torch.autograd.Function):
    """The gradient of one result only arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x**3, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return first * 3 * x * x + second * 3


def of_result(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    torch.manual_seed(1)
    y = function(x)
    return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True, create_graph=True)[0]


def of_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    torch.manual_seed(1)
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    return torch.autograd.grad(first, x, torch.eye(3), is_grads_batched=True, create_graph=True)[0]


def of_jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return jacobian(function, x, create_graph=True, vectorize=True)


def of_hessian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return hessian(lambda value: function(value).sum(), x, create_graph=True, vectorize=True)


@pytest.mark.parametrize("asked", [of_result, of_gradient, of_jacobian, of_hessian])
@pytest.mark.parametrize("function", [cubes, dropped, pair])
@pytest.mark.parametrize("collects", [False, True])
def test_batched_gradients_are_differentiated(
    function: Callable[[Tensor], Tensor],
    asked: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
    collects: bool,
    quiet: None,
) -> None:
    def outcome(called: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = torch.tensor([0.5, -1.5, 2.0], requires_grad=True)
        found = asked(called, x)
        return [found.detach(), torch.autograd.grad((found * found).sum(), x)[0]]

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    if collects:
        with dovetail.compiled_autograd(backend="aten"):
            found = outcome(compiled)
    else:
        found = outcome(compiled)
    expected = outcome(function)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


def test_what_cannot_run_again_is_refused(quiet: None) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5).sin() * torch.func.grad(lambda value: value.sin().sum())(x).detach()

    x = torch.tensor([0.5, -1.5, 2.0], requires_grad=True)
    with pytest.raises(HigherOrderGradientError):
        of_result(dovetail.compile(function, backend="aten", fullgraph=True), x)
