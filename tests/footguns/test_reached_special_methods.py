"""Special methods of the user's objects that native code reaches through other objects: all are run, and read, at each call."""

from __future__ import annotations

import collections
import itertools
import operator
import types
import weakref
from typing import Any

import pytest
import torch

import dovetail

pytestmark = pytest.mark.usefixtures("quiet")

LOG: list[str] = []
STATE = {"factor": 1}


class Shown:
    """What it answers follows from a global variable."""

    def __repr__(self) -> str:
        LOG.append("repr")
        return "r" * STATE["factor"]

    def __eq__(self, other: object) -> bool:
        LOG.append("eq")
        return STATE["factor"] == 1

    __hash__ = None  # type: ignore[assignment]

    def __lt__(self, other: object) -> bool:
        LOG.append("lt")
        return STATE["factor"] == 2

    def __gt__(self, other: object) -> bool:
        LOG.append("gt")
        return STATE["factor"] == 2

    def __bool__(self) -> bool:
        LOG.append("bool")
        return STATE["factor"] == 1


class Texted(Shown):
    """Calls the method of ``object``, which asks for the text."""

    def __str__(self) -> str:
        return "<" + super().__str__() + ">"

    def __format__(self, form: str) -> str:
        return super().__format__("") + form


class Told(Exception):
    """Adds to the text of its arguments."""

    def __str__(self) -> str:
        return super().__str__() + "!"


class Items(list[Any]):
    """Calls the methods of ``list``."""

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, item: object) -> bool:
        return super().__contains__(item)


class Wide(type):
    """Every class is a subclass, if this is asked."""

    def __subclasscheck__(cls, other: type) -> bool:
        LOG.append("subclass")
        return True


class Left(metaclass=Wide):
    def __add__(self, other: object) -> str:
        return "left"

    def __lt__(self, other: object) -> str:
        return "left"


class Right(metaclass=Wide):
    def __radd__(self, other: object) -> str:
        return "right"

    def __gt__(self, other: object) -> str:
        return "right"


def _handled(value: Any) -> str:
    try:
        raise Told(value)
    except Told as error:
        return str(error)


class Hashed:
    """Its hash follows from a global variable, until a weak reference has kept it."""

    def __hash__(self) -> int:
        LOG.append("hash")
        return STATE["factor"]


HASHED = Hashed()
A, B, T = Shown(), Shown(), Texted()
LEFT, RIGHT = Left(), Right()
PROGRAMS: dict[str, Any] = {
    "str of object": lambda: (str(T), object.__str__(T), T.__str__()),
    "format of object": lambda: (f"{T:x}", object.__format__(T, "")),
    "text of an error": lambda: (str(ValueError(A)), repr(ValueError(A, 1)), f"{KeyError(A)}"),
    "text of an error of the user's": lambda: str(Told(A)),
    "an error that is handled": lambda: _handled(A),
    "unequal, of object": lambda: object.__ne__(A, B),
    "methods of list": lambda: (list.__eq__([A], [B]), list.__lt__([A], [B]), list.__contains__([A], B)),
    "repr of list": lambda: (list.__repr__([A]), dict.__repr__({1: A}), tuple.__repr__((A,))),
    "methods of dict": lambda: (dict.__eq__({1: A}, {1: B}), dict.__ne__({1: A}, {1: B})),
    "a list of the user's": lambda: (Items([A]) == Items([B]), B in Items([A])),
    "deep inside": lambda: (((((((A,),),),),) < (((((B,),),),),)), str([[[[[A]]]]])),
    "views": lambda: (str({1: A}.values()), {1: A}.items() == {1: B}.items(), max({1: A, 2: B}.values()) is A),
    "weak references": lambda: (weakref.ref(A) == weakref.ref(B), weakref.ref(A) != weakref.ref(B)),
    "the hash of a weak reference": lambda: hash(weakref.ref(HASHED)),
    "a namespace": lambda: (repr(types.SimpleNamespace(a=A)), types.SimpleNamespace(a=A) == types.SimpleNamespace(a=B)),
    "the truth of items": lambda: (
        len([*itertools.takewhile(bool, [A, B])]),
        len([*itertools.filterfalse(None, [A, B])]),
        list(itertools.compress([1, 2], [A, B])),
        len([*itertools.dropwhile(operator.truth, [A, B])]),
    ),
    "the greatest so far": lambda: [item is A for item in itertools.accumulate([A, B], max)],
    "no subclass of each other": lambda: (LEFT + RIGHT, LEFT < RIGHT),  # type: ignore[operator]
    "a deque": lambda: (collections.deque([A]) == collections.deque([B]), repr(collections.deque([A]))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_they_run_at_each_call(name: str) -> None:
    def program(x: torch.Tensor) -> Any:
        return PROGRAMS[name](), x * 2

    def answers(function: Any) -> list[Any]:
        LOG.clear()
        found: list[Any] = []
        for factor in (1, 1, 2, 1):
            STATE["factor"] = factor
            found += [function(torch.ones(2))[0], list(LOG)]
        return found

    expected = answers(program)
    assert answers(dovetail.compile(program, backend="aten")) == expected
