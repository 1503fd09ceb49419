"""Objects of native classes, handed over: what their methods and special methods read is guarded, or the graph breaks."""

from __future__ import annotations

import array
import datetime
import decimal
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dovetail
from tests.differential import compare_call, leaf

pytestmark = pytest.mark.usefixtures("quiet")
aten = torch.ops.aten


class Holder:
    __slots__ = ("first", "second")

    def __init__(self) -> None:
        self.first, self.second = 3, 4

    @property
    def third(self) -> int:
        return 5

    @property
    def fourth(self) -> int:
        return 6

    @classmethod
    def fifth(cls) -> int:
        return 7

    @staticmethod
    def sixth() -> int:
        return 8


class Other(Holder):
    @classmethod
    def fifth(cls) -> int:
        return 9

    @staticmethod
    def sixth() -> int:
        return 10


def of(name: str) -> tuple[Any, Any]:
    return vars(Holder)[name], vars(Other)[name]


#: A use of an object, and two objects for which it gives something else.
USES: dict[str, tuple[Callable[[Any, Any], Any], Any, Any]] = {
    "a native attribute": (lambda g, x: (g.__get__(x), x * 2), torch.Tensor.shape, torch.Tensor.dtype),
    "its getter": (lambda g, x: (g(x), x * 2), torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__),
    "a slot": (lambda g, x: x * g.__get__(Holder()), Holder.first, Holder.second),
    "a property": (lambda g, x: x * g.__get__(Holder()), Holder.third, Holder.fourth),
    "a class method": (lambda g, x: x * g.__get__(None, Holder)(), *of("fifth")),
    "a static method": (lambda g, x: x * g.__get__(None, Holder)(), *of("sixth")),
    "a native class method": (
        lambda g, x: (x * 2, g.__get__(None, dict)("ab")),
        vars(dict)["fromkeys"],
        vars(dict)["__class_getitem__"],
    ),
    "a packet of operators": (lambda g, x: g(x), aten.sin, aten.cos),
    "one of a packet": (lambda g, x: g.default(x), aten.sin, aten.cos),
    "a decimal": (lambda g, x: x * float(g.__add__(1)), decimal.Decimal("1.5"), decimal.Decimal("2.5")),
    "a date": (lambda g, x: x * g.__lt__(datetime.date(2020, 1, 4)), *(datetime.date(2020, 1, day) for day in (3, 4))),
    "an array": (lambda g, x: x * g.__getitem__(0), array.array("i", [3]), array.array("i", [4])),
    "NumPy's": (lambda g, x: x * float(g.__getitem__(0)), np.array([2.0]), np.array([3.0])),
    "bytes": (lambda g, x: x * g.__len__(), bytearray(b"a"), bytearray(b"bb")),
    "a view of a dictionary": (
        lambda g, x: x * g.__getitem__("a"),
        types.MappingProxyType({"a": 1}),
        types.MappingProxyType({"a": 2}),
    ),
    "a partial function": (lambda g, x: g.__call__(x), *(functools.partial(torch.mul, other=n) for n in (2, 3))),
    "a getter of items": (lambda g, x: g.__call__(x), operator.itemgetter(0), operator.itemgetter(1)),
    "an error": (lambda g, x: (x * 2, g.__str__()), ValueError("a"), ValueError("b")),
}


@pytest.mark.parametrize("use", USES)
def test_another_object_of_the_same_class(use: str) -> None:
    function, one, other = USES[use]
    given = [one]
    compiled = dovetail.compile(lambda x: function(given[0], x), backend="aten")
    for given[0] in (one, other, one):
        compare_call(lambda x: function(given[0], x), compiled, (leaf(2),))
