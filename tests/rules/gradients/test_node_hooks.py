"""Hooks that the program registers on nodes of autograd."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail.errors import EagerFallbackWarning, HigherOrderGradientError

Tensor = torch.Tensor


def before_the_node(x: Tensor) -> Tensor:
    y = x.sin()
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
    return (y * x).sum()


def behind_the_node(x: Tensor) -> Tensor:
    y = x.sin()
    y.grad_fn.register_hook(lambda results, gradients: (results[0] * gradients[0],))
    return (y * x).sum()


class Sine(torch.autograd.Function):
    """A node of Python's."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


def behind_a_custom_node(x: Tensor) -> Tensor:
    y = Sine.apply(x)
    y.grad_fn.register_hook(lambda results, gradients: (results[0] * 3,))
    return (y * x).sum()


def leaf() -> Tensor:
    return torch.tensor([0.5, -1.5, 2.0], requires_grad=True)


@pytest.mark.parametrize("function", [before_the_node, behind_the_node, behind_a_custom_node])
def test_a_backward_that_is_differentiated_has_the_hook(function: object) -> None:
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    x, y = leaf(), leaf()
    (expected,) = torch.autograd.grad(function(x), x, create_graph=True)  # type: ignore[operator]
    assert torch.equal(torch.autograd.grad(compiled(y), y)[0], expected)
    (found,) = torch.autograd.grad(compiled(y), y, create_graph=True)
    assert torch.equal(found, expected)
    with pytest.raises(HigherOrderGradientError, match="registers a hook on a node of autograd"):
        found.sum().backward()


def on_the_leafs_node(x: Tensor) -> Tensor:
    y = x * x
    y.grad_fn.next_functions[0][0].register_prehook(lambda gradients: (gradients[0] * 3,))
    return y.sum()


def test_a_hook_on_the_node_of_a_leaf_stays_there() -> None:
    x, y = leaf(), leaf()
    with pytest.warns(EagerFallbackWarning, match="a node of autograd that outlives the call"):
        result = dovetail.compile(on_the_leafs_node, backend="aten")(y)
    result.backward()
    on_the_leafs_node(x).backward()
    assert torch.equal(x.grad, y.grad)


def test_a_hook_on_the_node_of_an_input_is_registered_once() -> None:
    def function(x: Tensor) -> Tensor:
        x.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
        return (x * x).sum()

    x, y = leaf(), leaf()
    with pytest.warns(EagerFallbackWarning):
        result = dovetail.compile(function, backend="aten")(y * 1)
    assert torch.equal(torch.autograd.grad(result, y)[0], torch.autograd.grad(function(x * 1), x)[0])
