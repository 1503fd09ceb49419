"""``functools.singledispatch`` and ``singledispatchmethod`` in a compiled function."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import check_calls, check_entries, compare_call, entries_of, leaf, same


class Point:
    """A class of the program's own."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Near(Point):
    """A class that inherits what is registered."""


@functools.singledispatch
def doubled(value: Any, *rest: Any) -> Any:
    return value


@doubled.register
def _(value: torch.Tensor, factor: float = 2.0) -> Any:
    return value * factor


@doubled.register(list)
@doubled.register(tuple)
def _(value: Any) -> Any:
    return type(value)([doubled(item) for item in value])


@doubled.register
def _(value: int) -> Any:
    return value * 2


@doubled.register
def _(value: Point) -> Any:
    return doubled(value.x)


class Layer:
    """An object with a method for each class."""

    scale = 3.0

    @functools.singledispatchmethod
    def apply(self, value: Any) -> Any:
        return value

    @apply.register
    def _(self, value: torch.Tensor) -> Any:
        return value * self.scale

    @apply.register
    def _(self, value: list) -> Any:  # type: ignore[type-arg]
        return [self.apply(item) for item in value]


def test_functions_of_a_class() -> None:
    def function(x: Any, n: Any) -> Any:
        return doubled([x, (x * 2, n)]), doubled(Near(x.sin())), doubled(x, 3.0), doubled("text")

    check_calls(function, [(leaf(3), 2), (leaf(3), 2.5), (leaf(3), True)], backend="aten", fullgraph=True)


def test_methods() -> None:
    layer = Layer()

    def function(x: Any) -> Any:
        return layer.apply(x), layer.apply([x.sin(), 3])

    # Python 3.13.0 and 3.13.1 look bound methods up in a dictionary by the object, which may compare as it likes: a graph break.
    looks_up = hasattr(functools.singledispatchmethod(len), "_method_cache")
    assert check_entries(function, [(leaf(3),), (leaf(3),)], fullgraph=not looks_up) == 1 or looks_up


def test_a_function_that_is_registered_later() -> None:
    @functools.singledispatch
    def shown(value: Any) -> Any:
        return 1.0

    def function(x: Any) -> Any:
        return x * shown(x) + shown(3)

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    x = torch.ones(3)
    same(function(x), compiled(x))
    shown.register(torch.Tensor, lambda value: value * 4)
    same(function(x), compiled(x))
    shown.register(int, lambda value: value * 5)
    same(function(x), compiled(x))
    same(function(x), compiled(x))
    assert len(compiled.entries) == 3


def _known(base: Any, x: torch.Tensor) -> Any:
    found = base.__subclasses__()
    found.append(base)
    return x * len(found), [kind.__name__ for kind in found], type.__subclasses__(base) == found[:-1]


def _weights(base: Any, x: torch.Tensor) -> Any:
    return x * sum(kind.weight for kind in base.__subclasses__())


def _deep(base: Any, x: torch.Tensor) -> Any:
    return x * sum(len(kind.__subclasses__()) for kind in base.__subclasses__())


@pytest.mark.parametrize("function", [_known, _weights, _deep])
def test_the_subclasses_of_a_class_are_those_of_the_call(function: Any) -> None:
    class Base:
        weight = 1

    class First(Base):
        weight = 2

    compiled = dovetail.compile(lambda x: function(Base, x), backend="aten", fullgraph=True)

    def compare(captures: int) -> None:
        for _ in range(2):
            compare_call(lambda x: function(Base, x), compiled, (leaf(3),))
        assert entries_of(compiled) <= captures

    compare(1)
    second = type("Second", (Base,), {"weight": 5})
    compare(2)
    third = type("Third", (second,), {})
    compare(3)
    First.weight = 7
    compare(4)
    del second, third
    gc.collect()
    compare(5)
