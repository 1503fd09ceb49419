"""Custom functions in a captured backward: of a compiled function that gives some gradients only, and what they do to ``ctx``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import dovetail

Tensor = torch.Tensor


class TwoResults(torch.autograd.Function):
    """Another backward for each set of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        if first is None:
            assert second is not None
            return second * 5, second * x
        return (first * y, first * x) if second is None else (first * y + second, first * x + second)


class LetsGo(torch.autograd.Function):
    """Deletes an attribute of ``ctx`` that it has read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = x.exp()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        factor = ctx.factor
        del ctx.factor
        assert not hasattr(ctx, "factor")
        return gradient * factor


def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return TwoResults.apply(x * 1, y * 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("is_captured", [False, True])
def test_some_gradients_of_a_compiled_function(is_captured: bool, create_graph: bool) -> None:
    def gradients(function: Any) -> list[Any]:
        found: list[Any] = []
        for which in ((0,), (1,), (0, 1), (0,)):
            x, y = (torch.linspace(-1.0, start, 4, requires_grad=True) for start in (1.0, 2.0))
            results = function(x, y)
            loss = sum(results[index].sin().sum() for index in which)
            first = torch.autograd.grad(loss, (x, y), create_graph=create_graph)
            found += [item.detach() for item in first]
            if create_graph:
                found += torch.autograd.grad(sum(item.sum() for item in first), (x, y))
        return found

    compiled = dovetail.compile(two, backend="aten", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if is_captured:
            with dovetail.compiled_autograd(backend="aten") as backwards:
                found = gradients(compiled)
            assert not backwards.fallbacks
        else:
            found = gradients(compiled)
    expected = gradients(two)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6 if create_graph else 0, atol=1e-6 if create_graph else 0)


def test_the_backward_of_a_compiled_function_within_autocast() -> None:
    def gradient(function: Any) -> Tensor:
        x = torch.full((4, 4), 1.001, requires_grad=True)
        y = function(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(y.sum(), x)[0]

    def function(x: Tensor) -> Tensor:
        return x @ x

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with dovetail.compiled_autograd(backend="aten"):
            found = gradient(compiled)
    assert torch.equal(found, gradient(function))


def test_an_attribute_of_ctx_is_deleted() -> None:
    x, y = (torch.linspace(-1.0, 1.0, 4, requires_grad=True) for _ in range(2))
    LetsGo.apply(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with dovetail.compiled_autograd(backend="aten"):
            LetsGo.apply(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
