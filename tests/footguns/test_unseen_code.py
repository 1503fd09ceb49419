"""Python code that native code would run: constructors of errors, ``_missing_`` of enumerations, sums of an accumulation."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import leaf, same

pytestmark = pytest.mark.usefixtures("quiet")


class Settings:
    scale = 2
    made = 0


class Coded(Exception):
    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text, Settings.scale)
        self.code, self.scale = code, Settings.scale
        Settings.made += 1


class Derived(Coded):
    def __init__(self, text: str, **others: Any) -> None:
        super().__init__(text, **others)
        self.extra = [1]


class MadeByNew(ValueError):
    def __new__(cls, *args: Any, **kwargs: Any) -> MadeByNew:
        made = super().__new__(cls, *args)
        made.scale = Settings.scale  # type: ignore[attr-defined]
        return made

    def __init__(self, first: int, second: int = 3) -> None:
        self.second = second


class Silent(KeyError):
    def __init__(self, key: int) -> None:
        self.key = key


@dataclasses.dataclass
class Record(Exception):
    first: int
    second: str = "z"


class Failing(Exception):
    def __init__(self) -> None:
        if Settings.scale > 2:
            raise TypeError("inside")


class Level(enum.Enum):
    LOW = 1
    HIGH = 2

    @classmethod
    def _missing_(cls, value: object) -> Level:
        Settings.made += 1
        return cls.HIGH if Settings.scale > 2 else cls.LOW


class Amount:
    def __init__(self, value: int) -> None:
        self.value = value

    def __add__(self, other: Amount) -> Amount:
        Settings.made += 1
        return Amount(self.value + other.value * Settings.scale)


def caught(error: Any, cause: Any = None) -> Any:
    try:
        raise error from cause
    except Exception as raised:
        return type(raised).__name__, raised.args, str(raised), vars(raised), raised.__cause__ is cause


@contextlib.contextmanager
def wrapping() -> Iterator[None]:
    try:
        yield
    except Coded as error:
        raise Derived("wrapped", code=error.code + Settings.scale) from error


def wrapped() -> Any:
    try:
        with wrapping():
            raise Coded("inside", 5)
    except Coded as error:
        return error.code, error.args


PROGRAMS: dict[str, Callable[[], Any]] = {
    "an error": lambda: caught(Coded("text", code=4)),
    "a class": lambda: caught(Failing),
    "a derived error": lambda: caught(Derived("text", code=7)),
    "made by __new__": lambda: caught(MadeByNew(1, second=2)),
    "without super()": lambda: caught(Silent(5)),
    "a data class": lambda: caught(Record(1)),
    "with a cause": lambda: caught(Coded("a"), Silent(3)),
    "in a context manager": wrapped,
    "that is kept": lambda: (Coded("a").args, Derived("b").extra, MadeByNew(7).args),
    "a missing member": lambda: (Level(9).name, Level(1).name),
    "an accumulation": lambda: [item.value for item in itertools.accumulate([Amount(1), Amount(2), Amount(3)])],
    "with a start": lambda: [item.value for item in itertools.accumulate([Amount(1)], initial=Amount(4))],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_reads_and_writes_at_every_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> Any:
        return x * 2, PROGRAMS[name]()

    compiled = dovetail.compile(function, backend="aten")
    for scale in (2, 3, 2, 5):
        monkeypatch.setattr(Settings, "scale", scale)
        results, x = [], leaf(2)
        for run in (function, compiled):
            monkeypatch.setattr(Settings, "made", 0)
            results.append((run(x), Settings.made))
        same(*results)


def test_an_error_of_ones_own_that_leaves_the_function() -> None:
    def function(x: torch.Tensor) -> Any:
        raise Derived("out", code=7)

    compiled = dovetail.compile(function, backend="aten")
    for run in (function, compiled, compiled):
        with pytest.raises(Derived, match="out") as raised:
            run(leaf(2))
        assert vars(raised.value) == {"code": 7, "scale": 2, "extra": [1]}
        assert raised.value.args == ("out", 2)
