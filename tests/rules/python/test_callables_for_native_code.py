"""Getters and caches that native code calls, and native code that writes what nobody journals."""

from __future__ import annotations

import abc
import bisect
import contextlib
import decimal
import functools
import itertools
import operator
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._device import set_device

import dovetail
from dovetail.errors import GraphBreakWarning

PAIRS = [("A", 3), ("B", 2), ("A", 1)]


@functools.cache
def first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


@functools.cache
def second(pair: tuple[Any, Any]) -> Any:
    return pair[1]


def in_place(key: Any) -> list[Any]:
    pairs = list(PAIRS)
    pairs.sort(key=key)
    return pairs


CALLERS: dict[str, Callable[[Any], Any]] = {
    "sorted": lambda key: sorted(PAIRS, key=key),
    "max": lambda key: max(PAIRS, key=key),
    "min": lambda key: min(PAIRS, key=key),
    "sort": in_place,
    "map": lambda key: list(map(key, PAIRS)),
    "filter": lambda key: list(filter(key, [(0, 1), (1, 0)])),
    "groupby": lambda key: [(name, list(group)) for name, group in itertools.groupby(PAIRS, key)],
    "takewhile": lambda key: list(itertools.takewhile(key, [(1, 0), (0, 1)])),
    "starmap": lambda key: list(itertools.starmap(key, [(pair,) for pair in PAIRS])),
    "bisect": lambda key: bisect.bisect([(1, 5), (2, 6), (4, 7)], 3, key=key),
    "called": lambda key: operator.call(key, PAIRS[0]),
    "a factory": lambda key: defaultdict(functools.partial(key, PAIRS[0]))[1],
}
KEYS: dict[str, tuple[Any, Any]] = {
    "itemgetter": (operator.itemgetter(0), operator.itemgetter(1)),
    "methodcaller": (operator.methodcaller("__getitem__", 0), operator.methodcaller("__getitem__", 1)),
    "cache": (first, second),
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("call", CALLERS.values(), ids=CALLERS)
def test_another_key_is_another_result(call: Callable[[Any], Any], keys: tuple[Any, Any]) -> None:
    def step(x: torch.Tensor, key: Any) -> Any:
        return x + 1, call(key)

    compiled = dovetail.compile(step, backend="aten")
    for key in (*keys, keys[0]):
        assert compiled(torch.ones(2), key)[1] == call(key)


def _as_key(key: Any) -> Any:
    numbers = [3, -4]
    numbers.sort(key=key)
    return numbers, max([-3, 2], key=key), [bool(item) for item in filter(key, [0, 1, 0])], key(-2)


class Held:
    """What a weak reference is to."""


HELD = (Held(), Held())
NATIVE: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "numpy": (_as_key, numpy.abs, numpy.sign),
    "a function of numpy's": (lambda key: key([1, 2, 6]), numpy.mean, numpy.median),
    "a getter for re.sub": (lambda key: re.sub("(A)B", key, "xAB"), operator.itemgetter(0), operator.itemgetter(1)),
    "a weak reference": (lambda key: operator.call(key) is HELD[0], weakref.ref(HELD[0]), weakref.ref(HELD[1])),
}


@pytest.mark.parametrize(("call", "first_one", "other"), NATIVE.values(), ids=NATIVE)
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
def test_another_native_object_is_another_result(call: Callable[[Any], Any], first_one: Any, other: Any) -> None:
    def step(x: torch.Tensor, key: Any) -> Any:
        return x + 1, call(key)

    compiled = dovetail.compile(step, backend="aten")
    for key in (first_one, other, first_one):
        assert compiled(torch.ones(2), key)[1] == call(key)


@contextlib.contextmanager
def wrapping() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"caught {error!r}") from error


@pytest.mark.parametrize("kind", [StopIteration, ValueError])
def test_an_error_that_a_context_manager_is_left_with(kind: type[Exception]) -> None:
    def step(x: torch.Tensor) -> Any:
        try:
            with wrapping():
                raise kind(3)
        except Exception as raised:
            return x + 1, type(raised), str(raised)

    compiled = dovetail.compile(step, backend="aten", fullgraph=True)
    assert compiled(torch.ones(2))[1:] == step(torch.ones(2))[1:]


class Curious:
    """Asked for what it has not, it counts."""

    asked = 0

    def __getattr__(self, name: str) -> Any:
        Curious.asked += 1
        raise AttributeError(name)


@pytest.mark.parametrize("index", ["a", Curious()], ids=["a text", "an object"])
def test_what_cannot_be_an_index(index: Any) -> None:
    def step(x: torch.Tensor, items: Any) -> Any:
        try:
            return x + 1, items[index]
        except TypeError as error:
            return x + 1, str(error)

    for items in ([1], (1,)):
        compiled = dovetail.compile(step, backend="aten", fullgraph=True)
        assert compiled(torch.ones(2), items)[1] == step(torch.ones(2), items)[1]
    assert Curious.asked == 0


def test_attributes_that_a_native_object_finds_by_itself() -> None:
    def step(x: torch.Tensor) -> Any:
        with decimal.localcontext() as context:
            return x + 1, context.traps[decimal.Inexact], context.flags[decimal.Inexact]

    compiled = dovetail.compile(step, backend="aten")
    with pytest.warns(GraphBreakWarning):
        assert compiled(torch.ones(2))[1:] == step(torch.ones(2))[1:]


def test_a_class_is_registered_with_an_abstract_one() -> None:
    class Shown(abc.ABC):
        pass

    class Plain:
        pass

    def step(x: torch.Tensor) -> Any:
        before = issubclass(Plain, Shown)
        Shown.register(Plain)
        return x + 1, before, issubclass(Plain, Shown)

    compiled = dovetail.compile(step, backend="aten")
    with pytest.warns(GraphBreakWarning, match="abstract base class"):
        assert compiled(torch.ones(2))[1:] == (False, True)
    assert compiled(torch.ones(2))[1:] == (True, True)


def _curve(value: torch.Tensor) -> torch.Tensor:
    return value.sin() + 2


MADE_OUTSIDE = make_fx(_curve)


@pytest.mark.parametrize("is_made_outside", [False, True])
def test_a_program_that_is_traced_inside(is_made_outside: bool) -> None:
    def step(x: torch.Tensor) -> Any:
        graph = (MADE_OUTSIDE if is_made_outside else make_fx(_curve))(x)
        return graph(x * 3)

    compiled = dovetail.compile(step, backend="aten")
    with pytest.warns(GraphBreakWarning, match="make_fx"):
        assert torch.equal(compiled(torch.ones(2)), step(torch.ones(2)))


def places() -> Iterator[torch.device]:
    yield torch.empty(1).device
    yield torch.empty(1).device


def test_a_generator_is_decorated_by_torch() -> None:
    def step(x: torch.Tensor) -> Any:
        return x + 1, list(set_device("meta")(places)()), torch.empty(1).device

    compiled = dovetail.compile(step, backend="aten", fullgraph=True)
    assert compiled(torch.ones(2))[1:] == step(torch.ones(2))[1:]
    assert compiled(torch.ones(2))[1][0] == torch.device("meta")
