"""Hooks and custom backwards that keep something in the program's own objects for the next backward of the same call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import EagerFallbackWarning

Tensor = torch.Tensor
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {}


def program(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    PROGRAMS[function.__name__] = function
    return function


class Counting(torch.autograd.Function):
    """Counts its backwards in an attribute of ``ctx``, and in a list there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.count, ctx.seen = 0, []
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.count += 1
        ctx.seen.append(ctx.count)
        return gradient * ctx.count * len(ctx.seen)


class LetsGo(torch.autograd.Function):
    """Lets go of what it has read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor, ctx.other = x.exp(), [x.sin()]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        factor, other = ctx.factor, ctx.other.pop()
        del ctx.factor
        ctx.other = None
        return gradient * factor + other * gradient


class Counter:
    """A hook with a slot."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.count += 1
        return gradient * self.count


def hooked(make: Callable[[], Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(make())
        return (y * y).sum()

    return run


@program
def in_ctx(x: Tensor) -> Tensor:
    return Counting.apply(x).sum()


@program
def in_a_cell(x: Tensor) -> Tensor:
    count = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return gradient * count

    y = x * 2
    y.register_hook(hook)
    return (y * y).sum()


@program
def in_a_set(x: Tensor) -> Tensor:
    seen = set()

    def hook(gradient: Tensor) -> Tensor:
        if "first" in seen:
            return gradient * 5
        seen.add("first")
        return gradient

    y = x * 2
    y.register_hook(hook)
    return (y * y).sum()


@program
def on_a_node(x: Tensor) -> Tensor:
    counts = [0]

    def hook(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        counts[0] += 1
        return (gradients[0] * counts[0],)

    y = x.sin()
    y.grad_fn.register_prehook(hook)
    return (y * y).sum()


class Appending(torch.autograd.Function):
    """Appends to a list that several calls share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: list[Tensor]) -> Tensor:
        ctx.box = box
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.box.append(gradient * 3)
        return gradient * 2 * len(ctx.box), None


@program
def in_a_list_that_calls_share(x: Tensor) -> Tensor:
    box: list[Tensor] = []
    return Appending.apply(Appending.apply(x, box), box).sum()


def _counted(box: dict[str, int], gradient: Tensor) -> Tensor:
    box["count"] = box.get("count", 0) + 1
    return gradient * box["count"]


def _popping() -> Callable[[Tensor], Tensor]:
    factors = [2.0, 3.0, 4.0]
    return lambda gradient: gradient * factors.pop()


def _stepping(made: Callable[[], Any]) -> Callable[[], Callable[[Tensor], Tensor]]:
    def make() -> Callable[[Tensor], Tensor]:
        steps = made()
        return lambda gradient: gradient * next(steps)

    return make


PROGRAMS["in_a_slot"] = hooked(Counter)
PROGRAMS["in_an_argument"] = hooked(lambda: functools.partial(_counted, {}))
PROGRAMS["from_a_list"] = hooked(_popping)
PROGRAMS["an_iterator"] = hooked(_stepping(lambda: iter([2.0, 3.0, 4.0])))
PROGRAMS["a_counter"] = hooked(_stepping(lambda: itertools.count(2)))
PROGRAMS["a_generator"] = hooked(_stepping(lambda: (factor for factor in (2.0, 3.0, 4.0))))
PROGRAMS["nested_iterators"] = hooked(_stepping(lambda: map(sum, zip([1.0, 2.0, 3.0], iter([4.0, 5.0, 6.0])))))


def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = torch.tensor([0.5, -1.5, 2.0], requires_grad=True)
    result = function(x)
    return [torch.autograd.grad(result, x, retain_graph=True)[0] for _ in range(3)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_second_backward_finds_what_the_first_has_left(name: str) -> None:
    expected = gradients(PROGRAMS[name])
    assert not torch.equal(expected[0], expected[1])
    with pytest.warns(EagerFallbackWarning, match="keeps something for the next backward|more than 1000 objects"):
        found = gradients(dovetail.compile(PROGRAMS[name], backend="aten"))
    assert all(map(torch.equal, found, expected))


def test_a_hook_that_reaches_very_many_objects_runs_in_eager() -> None:
    def make() -> Callable[[Tensor], Tensor]:
        boxes = [[1.0] for _ in range(1100)]

        def hook(gradient: Tensor) -> Tensor:
            boxes[-1][0] += 1.0
            return gradient * boxes[-1][0]

        return hook

    expected = gradients(hooked(make))
    with pytest.warns(EagerFallbackWarning, match="reaches more than 1000 objects"):
        found = gradients(dovetail.compile(hooked(make), backend="aten"))
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(expected[0], expected[1])


def test_what_a_custom_backward_lets_go_of_breaks_nothing() -> None:
    def function(x: Tensor) -> Tensor:
        return LetsGo.apply(x).sum()

    x, y = (torch.tensor([0.5, -1.5], requires_grad=True) for _ in range(2))
    function(x).backward()
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    compiled(y).backward()
    assert torch.equal(x.grad, y.grad)


def test_a_hook_of_an_input_counts_outside_of_the_graph() -> None:
    def function(x: Tensor) -> Tensor:
        x.register_hook(Counter())
        return (x * x).sum()

    assert all(
        map(torch.equal, gradients(dovetail.compile(function, backend="aten", fullgraph=True)), gradients(function))
    )
