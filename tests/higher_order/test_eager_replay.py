"""A derivative of a backward that the backend or torch's tracer cannot do: eager does it, with a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from dovetail.backends import register_backend
from dovetail.backends.registry import unregister_backend
from dovetail.errors import EagerFallbackWarning
from tests.differential import same

SECRET = "only first orders"


@pytest.fixture(autouse=True)
def _backend() -> Iterator[None]:
    @register_backend("first_order_only", tolerances=(0.0, 0.0))
    def first_order_only(graph: torch.fx.GraphModule, example_inputs: Any, *, kind: str, options: Any) -> Any:
        COUNT.append(kind)
        if COUNT.count("forward") > 1:
            raise RuntimeError(SECRET)
        return lambda inputs: list(graph(*inputs))

    COUNT.clear()
    yield
    unregister_backend("first_order_only")


COUNT: list[str] = []


def _leaf(seed: int) -> torch.Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def _orders(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], count: int = 2) -> list[Any]:
    total = function(*inputs).sum()
    found: list[Any] = []
    for order in range(count):
        slopes = torch.autograd.grad(
            total, inputs, create_graph=order < count - 1, allow_unused=True, materialize_grads=True
        )
        found.append([item.detach() for item in slopes])
        total = sum((item * item.detach().cos()).sum() for item in slopes)  # type: ignore[assignment]
    return found


def _computed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).sin() + x.pow(3)


def _written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.mul_(w)
    return y.sin() * x


def _dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x.pow(3), 0.5) * w


def _unused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = w.exp()
    return x.pow(3) * scale + w.detach()


class _Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0].exp()


def _custom(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return _Exponential.apply(x).pow(2) * w  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [_computed, _written, _dropped, _unused, _custom])
@pytest.mark.parametrize("count", [2, 3])
def test_as_eager(function: Callable[..., torch.Tensor], count: int) -> None:
    compiled = dovetail.compile(function, backend="first_order_only", fullgraph=True)
    for call in range(2):
        inputs = [_leaf(call), _leaf(call + 5)]
        torch.manual_seed(call)
        expected = _orders(function, inputs, count)
        torch.manual_seed(call)
        if call:
            actual = _orders(compiled, inputs, count)
        else:
            with pytest.warns(EagerFallbackWarning, match=SECRET):
                actual = _orders(compiled, inputs, count)
        torch.testing.assert_close(actual, expected)
    assert compiled.events.count("the next order runs eagerly") == 1


def test_inputs_computed_from_one_another() -> None:
    compiled = dovetail.compile(_computed, backend="first_order_only")
    for function in (_computed, compiled):
        x = _leaf(0)
        middle = x.sin()
        (slope,) = torch.autograd.grad(function(middle, x).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        if function is _computed:
            expected = x.grad
    same(expected, x.grad, exact=False)


def test_a_write_between_is_eagers_error() -> None:
    compiled = dovetail.compile(_computed, backend="first_order_only")
    for function in (_computed, compiled):
        x, w = _leaf(0), _leaf(1)
        (slope,) = torch.autograd.grad(function(x, w).sum(), x, create_graph=True)
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            slope.sum().backward()
