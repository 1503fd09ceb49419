"""Second derivatives with respect to inputs that get no gradient of first order, though a backward of the program's reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import clone_inputs, leaf, same

Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("quiet")


class OfFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (b,) = ctx.saved_tensors
        return gradient * b, None


class Several(torch.autograd.Function):
    """Its backward gives the second input a gradient from the second result only."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b)
        return a * b, b.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return first * b, second * a * 2


class SecondOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a)
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[None, Tensor]:
        (a,) = ctx.saved_tensors
        return None, second * 2 * a


def hooked(a: Tensor, b: Tensor) -> Tensor:
    y = a * 2
    y.register_hook(lambda gradient: gradient * b.sin())
    return y.cos()


def of_two(a: Tensor, b: Tensor) -> Tensor:
    first, second = SecondOnly.apply(a, b)
    return first * second


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "custom backward": OfFirst.apply,
    "behind a function": lambda a, b: OfFirst.apply(a, b.sin()),
    "used without gradient": lambda a, b: OfFirst.apply(a, b) + b.detach(),
    "hook": hooked,
    "one of two results": lambda a, b: Several.apply(a, b)[0],
    "leaves that a replay makes": of_two,
    "no such input": lambda a, b: a.sin() * b.detach(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_second_derivative_is_eagers(name: str) -> None:
    function, inputs = PROGRAMS[name], [leaf(3), leaf(3)]
    found = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        for _ in range(2):
            args = clone_inputs(inputs)
            first = torch.autograd.grad(run(*args).sum(), args, create_graph=True, allow_unused=True)
            total = sum((item * item).sum() for item in first if item is not None)
            second = torch.autograd.grad(total, args, allow_unused=True)
            # None and zeros of either sign are one gradient.
            found.append((first, [torch.zeros(3) if item is None else item + 0.0 for item in second]))
    for first, second in found[1:]:
        same(found[0], (first, second))


class SavesResult(torch.autograd.Function):
    """Its result is computed from the first input, and its backward leads from the result to the second."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        y = a.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (y,) = ctx.saved_tensors
        return None, y * gradient


def test_a_saved_result_leads_to_an_input_that_it_is_not_computed_from() -> None:
    found = []
    for run in (
        SavesResult.apply,
        dovetail.compile(lambda a, b: SavesResult.apply(a, b), backend="aten", fullgraph=True),
    ):
        a, b = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 3.0], requires_grad=True)
        (first,) = torch.autograd.grad(run(a, b).sum(), b, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), b))
    same(found[0], found[1])
