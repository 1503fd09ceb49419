"""Functions of the program that native code looks at, keeps or compares: it sees the functions themselves."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import check, compare_call, leaf


def plain(a: int, b: int = 2, *rest: int, c: int = 3, **others: int) -> int:
    """A function with every kind of parameter."""
    return a


def generator(a: Any) -> Any:
    yield a


async def coroutine(a: Any) -> Any:
    return a


class Holder:
    def method(self, q: int = 1) -> int:
        return q

    @staticmethod
    def static(a: Any, b: Any) -> Any:
        return a

    @classmethod
    def by_class(cls, a: Any) -> Any:
        return a


HOLDER = Holder()
FUNCTIONS: tuple[Any, ...] = (plain, generator, coroutine, HOLDER.method, Holder.method, Holder.static, Holder.by_class)
DESCRIBED: dict[str, Callable[[Any], Any]] = {
    "getfullargspec": inspect.getfullargspec,
    "signature": lambda f: str(inspect.signature(f)),
    "its own signature": lambda f: str(inspect.signature(f, follow_wrapped=False)),
    "a partial signature": lambda f: str(inspect.signature(functools.partial(f, 1))),
    "isgeneratorfunction": inspect.isgeneratorfunction,
    "iscoroutinefunction": inspect.iscoroutinefunction,
    "ismethod": inspect.ismethod,
    "isfunction": inspect.isfunction,
    "getfile": inspect.getfile,
    "getcallargs": lambda f: sorted(map(str, inspect.getcallargs(f, 1, 2))) if f is plain else None,
}
KEPT: dict[str, Callable[[Any], Any]] = {
    "is": lambda f: (operator.is_(f, f), operator.is_not(f, f)),
    "equal": lambda f: (operator.eq(f, f), operator.ne(f, f)),
    "in a list": lambda f: (operator.contains([f], f), operator.countOf([f], f), operator.indexOf([1, f], f)),
    "SimpleNamespace": lambda f: types.SimpleNamespace(f=f).f is f,
    "OrderedDict": lambda f: collections.OrderedDict(f=f)["f"] is f,
    "defaultdict": lambda f: collections.defaultdict(None, f=f)["f"] is f,
    "ValueError": lambda f: ValueError(f).args[0] is f,
    "property": lambda f: property(f).fget is f,
    "staticmethod": lambda f: staticmethod(f).__func__ is f,
    "weak reference": lambda f: isinstance(f, types.MethodType) or weakref.ref(f)() is f,
    "repeat": lambda f: next(itertools.repeat(f)) is f,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*DESCRIBED, *KEPT])
def test_native_code_sees_the_function_itself(name: str) -> None:
    look = {**DESCRIBED, **KEPT}[name]
    for function in FUNCTIONS:
        check(lambda x, function=function: (x * 2, look(function)), leaf(2))


def test_a_kept_function_is_interpreted_when_it_is_called() -> None:
    weight = leaf(2)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    def program(x: torch.Tensor) -> Any:
        table, space = collections.OrderedDict(f=scaled), types.SimpleNamespace(f=scaled)
        return table["f"](x) + space.f(x), property(scaled).fget(x), table  # type: ignore[misc]

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    compare_call(program, compiled, (leaf(2),))
    with torch.no_grad():
        weight.mul_(2)
    compare_call(program, compiled, (leaf(2),))


def test_a_signature_is_that_of_the_call() -> None:
    def changing(a: Any, b: int = 1) -> Any:
        return a

    def program(x: torch.Tensor) -> Any:
        return x * 2, str(inspect.signature(changing)), inspect.getfullargspec(changing)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for name, value in (
        ("__defaults__", (1,)),
        ("__defaults__", (5,)),
        ("__kwdefaults__", {}),
        ("__annotations__", {"a": int}),
        ("__annotations__", {"a": str}),
        ("__code__", (lambda z: z).__code__),
    ):
        setattr(changing, name, value)
        compare_call(program, compiled, (leaf(2),))
