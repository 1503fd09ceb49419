"""Iterators that an instruction takes items from before the graph breaks there, and such that existed before the call."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

pytestmark = pytest.mark.usefixtures("quiet")

LOG: list[Any] = []


class Counted:
    """Its own iterator, which begins again."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Counted:
        LOG.append("iter")
        return self

    def __next__(self) -> int:
        self.number += 1
        LOG.append(self.number)
        if self.number % 3 == 0:
            raise StopIteration
        return self.number


class Mapping:
    """Unpacked by its own methods."""

    def keys(self) -> list[str]:
        LOG.append("keys")
        return ["sep", "end"]

    def __getitem__(self, key: str) -> str:
        LOG.append(key)
        return key[0]


def _numbers() -> Iterator[int]:
    for number in (1, 2):
        LOG.append(number)
        yield number


def _show(number: int) -> int:
    print(number)
    return number


def _take_one(old: Iterator[int]) -> Any:
    iterator = iter([1, 2, 3])
    next(iterator)
    print(*iterator)
    return list(iterator)


def _loop(old: Iterator[int]) -> list[Any]:
    found: list[Any] = []
    for number in map(_show, [1, 2, 3]):
        found.append(number)
    for shown in map(print, _numbers()):
        found.append(shown)
    return found


def _sorted(old: Iterator[int]) -> Any:
    iterator = zip([3, 1], [2, 4], strict=True)
    return sorted(iterator, key=print) if old is None else max(iterator, key=lambda pair: (print(pair), pair[0])[1])


#: What is done between ``x * 2`` and ``x + 1``.
AT_BREAKS: dict[str, Any] = {
    "a generator expression": lambda old: print(*(number for number in range(3))),
    "a generator": lambda old: print(*_numbers(), sep="-"),
    "mapped": lambda old: print(*map(str, (1, 2))),
    "pairs": lambda old: print(*zip([1, 2], [3, 4], strict=True)),
    "an iterator of the user's": lambda old: print(*Counted()),
    "a mapping of the user's": lambda old: print(1, 2, **Mapping()),
    "what is left": _take_one,
    "printed by map": lambda old: list(map(print, [1, 2, 3])),
    "loops over what prints": _loop,
    "a key that prints": _sorted,
    "filtered": lambda old: list(filter(_show, iter([1, 0, 2]))),
    "accumulated": lambda old: list(itertools.accumulate([1, 2, 3], lambda a, b: _show(a) + b)),
    "a generator and one of before": lambda old: (
        [(a, b) for a, b in zip(_numbers(), old, strict=False)],
        next(old),
    ),
    "old: extended": lambda old: _changed([0], "extend", itertools.islice(old, 2)),
    "old: added": lambda old: _changed([0], "__iadd__", zip("ab", old, strict=False)),
    "old: updated": lambda old: (_changed({0}, "update", itertools.islice(old, 2)), next(old)),
    "old: pairs of a dictionary": lambda old: _changed({}, "update", zip("ab", old, strict=False)),
    "old: a deque": lambda old: _changed(collections.deque([1]), "extend", itertools.islice(old, 3)),
    "old: chained": lambda old: _changed([0], "extend", itertools.chain([1], itertools.islice(old, 1))),
    "old: asked by name": lambda old: (old.__next__(), old.__next__(), type(old).__next__(old)),
    "old: mapped": lambda old: _changed([], "extend", map(str, itertools.islice(old, 2))),
}


def _changed(container: Any, method: str, items: Any) -> Any:
    getattr(container, method)(items)
    return container


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", AT_BREAKS)
def test_no_item_is_lost_or_taken_twice(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def program(x: torch.Tensor, old: Any) -> Any:
        y = x * 2
        return AT_BREAKS[name](old), y + 1

    def answers(function: Any) -> list[Any]:
        LOG.clear()
        old, found = iter(range(100)), []
        for _ in range(3):
            result, tensor = function(torch.ones(2), old)
            found += [str(result), tensor.tolist(), list(LOG), capsys.readouterr().out]
        return [*found, next(old, None)]

    expected = answers(program)
    assert answers(dovetail.compile(program, backend="aten")) == expected


@pytest.mark.parametrize("method", ["extend", "__iadd__", "update"])
def test_an_iterator_that_is_handed_over_is_another_one_each_time(method: str) -> None:
    table = {"a": 1}

    def program(x: torch.Tensor, items: Any) -> Any:
        return _changed(set() if method == "update" else [], method, items), x * 2

    compiled = dovetail.compile(program, backend="aten")
    kinds = (
        *(lambda n: iter([n, 2]), lambda n: (i * n for i in range(3)), lambda n: map(str, [n]), lambda n: [n], range),
        *(lambda n: zip([n], [1], strict=True), lambda n: {n: 2}.values(), lambda n: {n: 2}.keys()),
        lambda n: table.values(),
    )
    for make in kinds:
        for number in (1, 2, 3):
            table["a"] = number
            expected = program(torch.ones(2), make(number))[0]
            assert compiled(torch.ones(2), make(number))[0] == expected


class Sequence:
    """Gone through backwards by its length and its items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


@pytest.mark.parametrize("kind", [list, Sequence])
def test_a_loop_over_tensors_backwards_goes_on_after_a_break(kind: Any) -> None:
    def program(x: torch.Tensor) -> Any:
        items = [x * number for number in range(4)]
        found = []
        for item in reversed(kind(items)):
            found.append(item.sum().tolist())
            items[0] = x - 1
        left = reversed(kind(items))
        next(left)
        print(end="")
        return found, list(left), type(left)

    compiled = dovetail.compile(program, backend="aten")
    same(program(torch.ones(2)), compiled(torch.ones(2)))
    reasons = [
        str(event.details["reason"]) for event in dovetail.events_of(compiled).events if event.name == "graph break"
    ]
    assert reasons and not any("leaves it" in reason for reason in reasons)
