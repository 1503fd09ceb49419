"""Objects that can be called, handed to a custom autograd.Function: its methods see the object itself, not a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dovetail
from tests.differential import same


class Scale:
    """A callable object with a number that may change."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.number


class ScaleModule(nn.Module):
    """The same as a module."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.number


class Apply(torch.autograd.Function):
    """Calls the object, asks what it is, and reads it."""

    @staticmethod
    def forward(ctx: Any, scale: Any, x: torch.Tensor) -> torch.Tensor:
        """See :class:`torch.autograd.Function`."""
        ctx.scale = scale
        if isinstance(scale, (Scale, ScaleModule)):
            return scale(x) + scale.number
        return scale(x) - getattr(scale, "number", 1000.0)

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        """See :class:`torch.autograd.Function`."""
        return None, ctx.scale(tangent) * getattr(ctx.scale, "number", 7.0)


def double(x: torch.Tensor) -> torch.Tensor:
    """A plain function with an attribute."""
    return x * 2


@pytest.mark.parametrize("make", [lambda: Scale(2.0), lambda: ScaleModule(2.0), lambda: double])
def test_the_object_itself_is_seen(make: Callable[[], Any]) -> None:
    scale = make()

    def function(x: torch.Tensor) -> torch.Tensor:
        return Apply.apply(scale, x).sum()  # type: ignore[no-untyped-call,no-any-return]

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for number in (2.0, 2.0, 3.0, 4.0):
        scale.number = number
        mine, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        expected, actual = function(mine), compiled(other)
        same(expected, actual)
        expected.backward()
        actual.backward()
        same(mine.grad, other.grad)


def _look(scale: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (getattr(scale, "number", 1000.0) if isinstance(scale, (Scale, ScaleModule)) else 7.0)


PROGRAMS: list[Callable[[Any, torch.Tensor], torch.Tensor]] = [
    lambda scale, x: torch.vmap(_look, in_dims=(None, 0))(scale, x).sum(),
    lambda scale, x: torch.func.grad(lambda x, scale: (_look(scale, x) ** 2).sum())(x, scale).sum(),
    lambda scale, x: checkpoint(_look, scale, x, use_reentrant=False).sum(),
    lambda scale, x: checkpoint(lambda scale, x: scale(x) * _look(scale, x), scale, x, use_reentrant=False).sum(),
]


@pytest.mark.parametrize("program", range(len(PROGRAMS)))
def test_functions_of_torch_hand_the_object_on(program: int) -> None:
    scale = Scale(2.0)
    compiled = dovetail.compile(lambda x: PROGRAMS[program](scale, x), backend="aten")
    for number in (2.0, 2.0, 3.0, 4.0):
        scale.number = number
        mine, other = torch.arange(3.0, requires_grad=True), torch.arange(3.0, requires_grad=True)
        expected, actual = PROGRAMS[program](scale, mine), compiled(other)
        same(expected, actual)
        expected.backward()
        actual.backward()
        same(mine.grad, other.grad)


def test_a_buffer_and_a_plain_tensor_are_told_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if isinstance(x, nn.Buffer) else 3)

    compiled = dovetail.compile(function, backend="aten")
    for x in (nn.Buffer(torch.ones(2)), torch.ones(2), nn.Buffer(torch.ones(2)), nn.Parameter(torch.ones(2))):
        same(function(x), compiled(x))


def test_what_the_backward_reads_changes_in_between() -> None:
    scale = Scale(2.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        return Apply.apply(scale, x).sum()  # type: ignore[no-untyped-call,no-any-return]

    compiled = dovetail.compile(function, backend="aten")
    x = torch.ones(3, requires_grad=True)
    result = compiled(x)
    scale.number = 5.0
    with pytest.raises(dovetail.errors.ChangedReadError):
        result.backward()
