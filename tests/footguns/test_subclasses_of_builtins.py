"""Objects of subclasses of Python's own classes: native code takes what they hold, past what the subclass says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail


class Count(int):
    """A number with a mind of its own."""

    def __index__(self) -> int:
        return 1

    def __rmul__(self, other: Any) -> Any:
        return 9


class Label(str):
    """A text."""


class Items(list[Any]):
    """A list that says something else than it holds."""

    def __iter__(self) -> Any:
        return iter([9, 8])

    def __len__(self) -> int:
        return 5


class Table(dict[str, Any]):
    """A dictionary that hides its keys."""

    def __iter__(self) -> Any:
        return iter(["a"])

    def __getitem__(self, key: str) -> Any:
        return dict.__getitem__(self, key) + 10


class Some(set[int]):
    """A set that is gone through in a way of its own."""

    def __iter__(self) -> Any:
        return iter([1, 2, 3])


class Pair(tuple[Any, ...]):
    """A tuple that refuses to say how long it is."""

    def __len__(self) -> int:
        raise NotImplementedError


COUNT, LABEL = Count(3), Label("ab")


def _set(count: int, label: str) -> None:
    global COUNT, LABEL
    COUNT, LABEL = Count(count), Label(label)


PROGRAMS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: [1, 2, 3, 4, 5][COUNT],
    lambda x: x[:COUNT].shape,
    lambda x: x * COUNT,
    lambda x: 2 * COUNT,
    lambda x: "ab" * 2 + "-".join([LABEL]),
    lambda x: [*LABEL],
    lambda x: list(range(COUNT)),
    lambda x: torch.zeros(COUNT).shape,
    lambda x: max(COUNT, 1) + 0,
    lambda x: x + float(COUNT),
]


@pytest.mark.parametrize("program", range(len(PROGRAMS)))
def test_a_number_or_text_of_a_class_of_its_own_changes(program: int) -> None:
    compiled = dovetail.compile(PROGRAMS[program], backend="aten")
    x = torch.arange(6.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for count, label in ((3, "ab"), (4, "abc"), (3, "b"), (4, "abc")):
            _set(count, label)
            expected, actual = PROGRAMS[program](x), compiled(x)
            assert type(expected) is type(actual)
            assert torch.equal(expected, actual) if isinstance(expected, torch.Tensor) else expected == actual


HELD: dict[str, Any] = {}
CONTAINERS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: HELD["items"].append(3),
    lambda x: [*HELD["items"]],
    lambda x: len(HELD["items"]),
    lambda x: HELD["items"].pop(),
    lambda x: list.__getitem__(HELD["items"], 0),
    lambda x: HELD["items"].extend([1, 2]),
    lambda x: HELD["items"].sort(),
    lambda x: HELD["items"].__setitem__(0, 6),
    lambda x: HELD["table"].update(b=3),
    lambda x: HELD["table"].setdefault("c", 3),
    lambda x: HELD["table"]["a"],
    lambda x: dict(HELD["table"]),
    lambda x: HELD["table"].get("a"),
    lambda x: HELD["some"].add(4),
    lambda x: 3 in HELD["some"],
    lambda x: sorted(HELD["some"]),
    lambda x: HELD["pair"][0],
    lambda x: isinstance(HELD["pair"], tuple) and bool(Pair((1, 2)) == (1, 2)),
]


def _contents() -> list[Any]:
    return [
        [*list.__iter__(HELD["items"])],
        dict(dict.items(HELD["table"])),
        {*set.__iter__(HELD["some"])},
        [*tuple.__iter__(HELD["pair"])],
    ]


@pytest.mark.parametrize("program", range(len(CONTAINERS)))
def test_a_container_that_lies(program: int) -> None:
    compiled = dovetail.compile(CONTAINERS[program], backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for first in (1, 1, 2, 2):
            seen = []
            for function in (CONTAINERS[program], compiled):
                HELD.update(items=Items([first, 2]), table=Table(a=first), some=Some([first]), pair=Pair((first, 2)))
                seen.append((function(torch.ones(1)), _contents()))
            assert seen[0] == seen[1]


def test_an_iterator_of_a_list_that_grew_since_the_last_break_stands_where_it_stood() -> None:
    def program(x: torch.Tensor) -> Any:
        out: list[int] = []
        print(end="")
        out.append(1)
        seen = []
        for item in out:
            print(end="")
            seen.append(item)
        return x * len(seen), seen, out

    compiled = dovetail.compile(program, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            result, seen, out = compiled(torch.ones(1))
            assert (float(result), seen, out) == (1.0, [1], [1])
