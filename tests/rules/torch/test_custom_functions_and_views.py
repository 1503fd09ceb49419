"""Views that custom functions and ``detach_`` meet, where eager refuses or gives each view a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Tensor = torch.Tensor


class Doubled(torch.autograd.Function):
    """Writes to its first argument, and has two results."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, other: Tensor) -> Any:
        ctx.mark_dirty(t)
        return t.mul_(2), other.sum()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        return first * 2, second.expand(2, 3)


class DoubledApart(Doubled):
    """The same with a ``setup_context`` of its own."""

    @staticmethod
    def forward(t: Tensor, other: Tensor) -> Any:  # type: ignore[override]
        return t.mul_(2), other.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(inputs[0])


class Tripled(torch.autograd.Function):
    """Writes to its argument, which is its only result."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.mark_dirty(t)
        return t.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class WithParts(torch.autograd.Function):
    """Returns a tensor and views of it; only the gradient of the first is used."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Any:
        whole = t * 2
        return whole, whole[0], whole.view(-1)

    @staticmethod
    def backward(ctx: Any, whole: Tensor, row: Tensor, flat: Tensor) -> Tensor:
        return whole * 2


def _written(kind: Any) -> Callable[[Tensor, Tensor], Any]:
    return lambda x, w: kind.apply(x, w)[0] * 2


def _detached(x: Tensor, w: Tensor) -> Any:
    x.detach_()
    return x * w


PROGRAMS = {
    "two results": _written(Doubled),
    "two results, a context of its own": _written(DoubledApart),
    "one result": lambda x, w: Tripled.apply(x) * w,
    "detach_": _detached,
    "torch.detach_": lambda x, w: torch.detach_(x) * w,
    "parts of a result": lambda x, w: WithParts.apply(x * w),
}

INPUTS = {
    "plain": lambda: torch.ones(2, 3),
    "view": lambda: torch.ones(2, 3)[:],
    "not a leaf": lambda: torch.ones(2, 3, requires_grad=True) * 2,
    "view of no leaf": lambda: (torch.ones(4, 3, requires_grad=True) * 2)[1:3],
}


def _seen(function: Any, make: Callable[[], Tensor]) -> Any:
    x, w = make(), torch.full((2, 3), 2.0, requires_grad=True)
    try:
        found = function(x, w)
    except RuntimeError as error:
        return str(error), x.detach().clone()
    results = found if isinstance(found, tuple) else (found,)
    weights = [torch.arange(1.0, 1 + result.numel()).view(result.shape) for result in results]
    sum((result * weight).sum() for result, weight in zip(results, weights, strict=True)).backward()
    flags = [(value.requires_grad, value.is_leaf, value._base is None) for value in (x, *results)]
    return [result.detach() for result in results], x.detach().clone(), w.grad, flags


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_views(program: str) -> None:
    function = PROGRAMS[program]
    compiled = dovetail.compile(function, backend="aten")
    for _ in range(2):
        for make in INPUTS.values():
            same(_seen(function, make), _seen(compiled, make))
