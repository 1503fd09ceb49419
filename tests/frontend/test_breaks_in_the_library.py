"""What cannot be captured in the middle of a function of the standard library runs for real with the whole of that call."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


def sampled(source: random.Random, x: Tensor) -> Any:
    y = x * 2
    first, second = source.sample(range(100), 2)
    return y * first, second


def chosen(source: random.Random, x: Tensor) -> Any:
    return x * source.choice([2.0, 3.0, 5.0]), source.randrange(100)


def shuffled(source: random.Random, x: Tensor) -> Any:
    places = list(range(6))
    source.shuffle(places)
    return x + 1, places


def several(source: random.Random, x: Tensor) -> Any:
    return x * 2, source.choices([1.5, 2.5], k=3), source.randint(3, 90), source.betavariate(1, 2)


@pytest.mark.parametrize("function", [sampled, chosen, shuffled, several])
def test_a_generator_of_the_programs_own(function: Callable[..., Any]) -> None:
    compiled, source, twin = dovetail.compile(function, backend="aten"), random.Random(3), random.Random(3)
    for _ in range(12):
        same(function(twin, torch.ones(3)), compiled(source, torch.ones(3)))
        assert source.getstate() == twin.getstate()


def test_a_sample_makes_no_entries_without_end() -> None:
    def function(source: random.Random, buffer: Any, x: Tensor) -> Any:
        batch = source.sample(buffer, 4)
        return x * torch.stack(batch).sum()

    compiled, source, twin = dovetail.compile(function, backend="aten"), random.Random(3), random.Random(3)
    buffer: collections.deque[Tensor] = collections.deque(maxlen=30)
    for number in range(40):
        buffer.extend([torch.full((2,), float(number)), torch.ones(2), torch.zeros(2), torch.ones(2)])
        same(function(twin, buffer, torch.ones(3)), compiled(source, buffer, torch.ones(3)))
    assert captures(compiled) <= 4


class Kept(Exception):
    """An error of the program's."""


def test_code_of_the_user_that_the_library_calls() -> None:
    """The break in it is that function's own, with what it has done."""
    noted: list[Any] = []

    class Managed(contextlib.AbstractContextManager[None]):
        def __exit__(self, *error: object) -> None:
            noted.append("left")
            print(end="")

    @contextlib.contextmanager
    def managed(x: Tensor) -> Any:
        noted.append(float(x.sum()))
        print(end="")
        yield x * 2
        noted.append("left as well")

    @functools.singledispatch
    def shown(value: Any) -> Any:
        print(end="")
        return value + 1

    def function(x: Tensor) -> Any:
        with Managed(), managed(x) as y, contextlib.suppress(Kept):
            z = shown(y * x)
            raise Kept
        return z

    compiled = dovetail.compile(function, backend="aten")
    for number in range(3):
        x = torch.full((2,), number + 1.0, requires_grad=True)
        eager = function(x)
        before = list(noted)
        noted.clear()
        same(eager, compiled(x))
        assert noted == before
        noted.clear()


def test_a_counter_is_updated() -> None:
    def function(counts: Any, x: Tensor) -> Any:
        y = x.relu()
        counts.update(y.argmax(1).tolist())
        return y * 2

    compiled = dovetail.compile(function, backend="aten")
    counts, twin = collections.Counter[int](), collections.Counter[int]()
    for number in range(6):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        same(function(twin, x), compiled(counts, x))
        assert counts == twin and list(counts) == list(twin)
