"""Objects that are hashed, compared or copied by methods of their own, which read more than the objects hold."""

from __future__ import annotations

import copy
import dataclasses
import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import check_calls, randn

pytestmark = pytest.mark.usefixtures("quiet")

SCALE = {"now": 1}
settings = types.ModuleType("settings")
settings.now = 1  # type: ignore[attr-defined]


class Key:
    """Compared by what it holds times a global number."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value * SCALE["now"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.value * SCALE["now"] == other.value * SCALE["now"]


class Inherits(Key):
    def __hash__(self) -> int:
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


class ByProperty:
    def __init__(self, value: int) -> None:
        self.value = value

    @property
    def key(self) -> int:
        return max(item * SCALE["now"] for item in (self.value, 0))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByProperty) and self.key == other.key


class ByClass:
    scale = 1

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value * self.scale)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByClass) and self.value * self.scale == other.value * self.scale


class Scale:
    """Settings of a program."""

    now = 1


class Held:
    def __init__(self, value: int) -> None:
        self.value = value


class ByOther(Held):
    def __hash__(self) -> int:
        return hash(self.value * Scale.now)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByOther) and self.value * Scale.now == other.value * Scale.now


class ByModule(Held):
    def __hash__(self) -> int:
        return hash(self.value * settings.now)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByModule) and self.value * settings.now == other.value * settings.now


class Counted:
    """Counts how often its objects are compared."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        Scale.compared = getattr(Scale, "compared", 0) + 1  # type: ignore[attr-defined]
        return isinstance(other, Counted) and self.value == other.value


class Reduced:
    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Reduced, (self.value + SCALE["now"],)


class HasState:
    value = 0

    def __getstate__(self) -> dict[str, int]:
        return {"value": SCALE["now"]}


class HasArguments:
    def __new__(cls, value: int = 0) -> HasArguments:
        made = object.__new__(cls)
        made.value = value  # type: ignore[attr-defined]
        return made

    def __getnewargs__(self) -> tuple[int]:
        return (SCALE["now"],)


@dataclasses.dataclass(frozen=True)
class Point:
    x: int = 0
    y: int = 1


PROGRAMS: dict[str, Callable[[], Any]] = {
    "dictionary": lambda: len({Key(1): 1, Key(2): 2}),
    "set": lambda: len({Key(0), Key(1), Key(3)}),
    "set()": lambda: len({*[Key(0), Key(1)]}),
    "comprehension": lambda: len({Key(item): item for item in range(3)}),
    "fromkeys": lambda: len(dict.fromkeys([Key(1), Key(2)])),
    "in": lambda: Key(2) in {Key(1), Key(3)},
    "in a tuple": lambda: len({(Key(1), 2), (Key(2), 2)}),
    "setdefault": lambda: {Key(1): 3}.setdefault(Key(2), 7),
    "pop": lambda: {Key(1): 3}.pop(Key(2), 7),
    "union": lambda: len({Key(1)} | {Key(2)}),
    "counter": lambda: len(Counter([Key(1), Key(2)])),
    "super": lambda: len({Inherits(1), Inherits(2)}),
    "property": lambda: len({ByProperty(1), ByProperty(2)}),
    "class": lambda: len({ByClass(1), ByClass(2)}),
    "another class": lambda: len({ByOther(1), ByOther(2)}),
    "a module": lambda: len({ByModule(1): 1, ByModule(2): 2}),
    "reduce": lambda: copy.copy(Reduced(1)).value,
    "state": lambda: copy.copy(HasState()).value,
    "arguments": lambda: copy.copy(HasArguments()).value,  # type: ignore[attr-defined]
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_decides_a_comparison_or_a_copy_may_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> Any:
        return x * PROGRAMS[name](), PROGRAMS[name]()

    compiled = dovetail.compile(function, backend="aten")
    for now in (1, 0, 3, 1):
        monkeypatch.setitem(SCALE, "now", now)
        monkeypatch.setattr(ByClass, "scale", now)
        monkeypatch.setattr(Scale, "now", now)
        monkeypatch.setattr(settings, "now", now)
        expected, actual = function(torch.ones(2)), compiled(torch.ones(2))
        assert actual[1] == expected[1]
        assert torch.equal(actual[0], expected[0])


def test_objects_that_hold_all_they_are_compared_by_break_no_graph() -> None:
    def function(x: torch.Tensor, n: int) -> Any:
        return x * len({Point(1), Point(n), Point(1)}) + {Point(n): 3}.get(Point(1), 4), copy.copy(Point(n)).x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_calls(function, [(randn(2), 1), (randn(2), 2)], entries=2, fullgraph=True)


COMPARING: dict[str, Callable[[], Any]] = {
    "set": lambda: len({Counted(1), Counted(2), Counted(1)}),
    "dictionary": lambda: {Counted(1): 1, Counted(2): 2}.get(Counted(2)),
    "store": lambda: {Counted(1): 1}.setdefault(Counted(1), 3),
    "comprehension": lambda: len({Counted(item % 2) for item in range(3)}),
    "frozenset": lambda: Counted(1) in frozenset([Counted(2), Counted(1)]),
}


@pytest.mark.parametrize("name", COMPARING)
def test_what_a_comparison_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> Any:
        return x * 2, COMPARING[name]()

    compiled = dovetail.compile(function, backend="aten")
    for _ in range(3):
        counts = []
        for run in (function, compiled):
            monkeypatch.setattr(Scale, "compared", 0, raising=False)
            found = run(torch.ones(2))[1]
            counts.append((found, Scale.compared))  # type: ignore[attr-defined]
        assert counts[0] == counts[1]
