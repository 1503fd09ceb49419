"""What a program finds missing, and what it finds on a class, may be another way at the next call."""

from __future__ import annotations

import abc
import builtins
import copy
import decimal
import enum
import functools
import logging
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import dovetail
from dovetail.reports.explanation import compiled_function

Function = Callable[[torch.Tensor], torch.Tensor]
Change = Callable[[], Any]

pytestmark = pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")


def check(function: Function, change: Change, undo: Change) -> None:
    """Eager's results before a change, after it and when it was taken back; also once the guards remember hits."""
    x = torch.ones(2)
    for calls in (1, 6):
        compiled: Any = dovetail.compile(function, backend="aten")
        for _ in range(calls):
            assert torch.equal(compiled(x), function(x))
        change()
        try:
            assert torch.equal(compiled(x), function(x))
        finally:
            undo()
        assert torch.equal(compiled(x), function(x))


# --- special methods and others that are replaced, or appear ----------------------------------------------------------


def _in_place(x: torch.Tensor, kind: Any) -> torch.Tensor:
    one = kind()
    one += 1
    return x * one


def _attribute_set(x: torch.Tensor, kind: Any) -> torch.Tensor:
    one = kind()
    one.place = 9
    return x * one.place


def _item_set(x: torch.Tensor, kind: Any) -> torch.Tensor:
    one = kind()
    one[0] = 1
    return x * one.place


def _item_deleted(x: torch.Tensor, kind: Any) -> torch.Tensor:
    one = kind()
    del one[0]
    return x * one.place


def _entered(x: torch.Tensor, kind: Any) -> torch.Tensor:
    with kind() as one:
        return x * one


def _sorted(x: torch.Tensor, kind: Any) -> torch.Tensor:
    one, other = kind(), kind()
    one.number, other.number = 1, 2
    return x * sorted([one, other])[0].number


def _made(kind: Any, number: int) -> Any:
    one = object.__new__(kind)
    one.number = number
    return one


METHODS: dict[str, tuple[Any, Any, Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "__len__": (lambda s: 2, lambda s: 3, lambda x, c: x * len(c())),
    "__add__": (lambda s, o: 2, lambda s, o: 3, lambda x, c: x * (c() + 1)),
    "__radd__": (lambda s, o: 2, lambda s, o: 3, lambda x, c: x * (1 + c())),
    "__iadd__": (lambda s, o: 2, lambda s, o: 3, _in_place),
    "__bool__": (lambda s: True, lambda s: False, lambda x, c: x * (2 if c() else 3)),
    "__eq__": (lambda s, o: True, lambda s, o: False, lambda x, c: x * (2 if c() == 1 else 3)),
    "__lt__": (lambda s, o: s.number < o.number, lambda s, o: s.number > o.number, _sorted),
    "__contains__": (lambda s, o: True, lambda s, o: False, lambda x, c: x * (2 if 1 in c() else 3)),
    "__getitem__": (lambda s, o: 2, lambda s, o: 3, lambda x, c: x * c()[1]),
    "__iter__": (lambda s: iter([2]), lambda s: iter([3]), lambda x, c: x * sum(c())),
    "__next__": (lambda s: 1, lambda s: 2, lambda x, c: x * next(c())),
    "__call__": (lambda s: 2, lambda s: 3, lambda x, c: x * c()()),
    "__init__": (lambda s: setattr(s, "q", 2), lambda s: setattr(s, "q", 3), lambda x, c: x * c().q),
    "__new__": (lambda c: _made(c, 2), lambda c: _made(c, 3), lambda x, c: x * c().number),
    "__getattr__": (lambda s, n: 2, lambda s, n: 3, lambda x, c: x * c().absent),
    "__getattribute__": (lambda s, n: 2, lambda s, n: 3, lambda x, c: x * c().absent),
    "__setattr__": (
        lambda s, n, v: object.__setattr__(s, n, 2),
        lambda s, n, v: object.__setattr__(s, n, 3),
        _attribute_set,
    ),
    "__setitem__": (lambda s, k, v: setattr(s, "place", 1), lambda s, k, v: setattr(s, "place", 2), _item_set),
    "__delitem__": (lambda s, k: setattr(s, "place", 1), lambda s, k: setattr(s, "place", 2), _item_deleted),
    "__neg__": (lambda s: 2, lambda s: 3, lambda x, c: x * -c()),
    "__abs__": (lambda s: 2, lambda s: 3, lambda x, c: x * abs(c())),
    "__str__": (lambda s: "a", lambda s: "ab", lambda x, c: x * len(str(c()))),
    "__repr__": (lambda s: "a", lambda s: "ab", lambda x, c: x * len(repr(c()))),
    "__format__": (lambda s, f: "a", lambda s, f: "ab", lambda x, c: x * len(f"{c()}")),
    "__hash__": (lambda s: 2, lambda s: 3, lambda x, c: x * hash(c())),
    "__index__": (lambda s: 1, lambda s: 2, lambda x, c: x * [5, 6, 7][c()]),
    "__float__": (lambda s: 1.0, lambda s: 2.0, lambda x, c: x * float(c())),
    "__enter__": (lambda s: 2, lambda s: 3, _entered),
    "amount": (property(lambda s: 2), property(lambda s: 3), lambda x, c: x * c().amount),
    "made": (staticmethod(lambda: 2), staticmethod(lambda: 3), lambda x, c: x * c().made()),
    "of_class": (classmethod(lambda c: 2), classmethod(lambda c: 3), lambda x, c: x * c.of_class()),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_replaced(name: str) -> None:
    before, after, use = METHODS[name]
    kind = type("Kind", (), {"__exit__": lambda s, *a: None, name: before})
    check(lambda x: use(x, kind), lambda: setattr(kind, name, after), lambda: setattr(kind, name, before))


def _or_three(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except TypeError:
        return 3


APPEARING: dict[str, tuple[Any, Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "__len__": (lambda s: 7, lambda x, c: x * _or_three(lambda: len(c()))),
    "__add__": (lambda s, o: 7, lambda x, c: x * _or_three(lambda: c() + 1)),
    "__bool__": (lambda s: False, lambda x, c: x * (2 if c() else 3)),
    "__eq__": (lambda s, o: True, lambda x, c: x * (2 if c() == 3 else 3)),
    "__call__": (lambda s: 7, lambda x, c: x * (2 if callable(c()) else 3)),
    "__iter__": (lambda s: iter([]), lambda x, c: x * (2 if hasattr(c(), "__iter__") else 3)),
    "__init__": (lambda s: setattr(s, "q", 8), lambda x, c: x * getattr(c(), "q", 3)),
    "__getattr__": (lambda s, n: 8, lambda x, c: x * getattr(c(), "q", 3)),
    "__setattr__": (lambda s, n, v: object.__setattr__(s, n, 2), _attribute_set),
    "late": (7, lambda x, c: x * getattr(c, "late", 3)),
    "later": (7, lambda x, c: x * (2 if hasattr(c, "later") else 3)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "where"),
    # A metaclass's own special methods are for the class.
    [
        (name, where)
        for name in APPEARING
        for where in ("class", "base", "metaclass")
        if where != "metaclass" or name[:2] != "__"
    ],
)
def test_a_method_appears(name: str, where: str) -> None:
    after, use = APPEARING[name]
    metaclass = type("Meta", (type,), {})
    base = metaclass("Base", (), {})
    kind = metaclass("Kind", (base,), {})
    target = {"class": kind, "base": base, "metaclass": metaclass}[where]
    check(lambda x: use(x, kind), lambda: setattr(target, name, after), lambda: delattr(target, name))


def test_super_finds_a_method_that_was_missing() -> None:
    class Base:
        pass

    class Derived(Base):
        def value(self) -> Any:
            return super().late() if hasattr(super(), "late") else 1  # type: ignore[misc]

    check(lambda x: x * Derived().value(), lambda: setattr(Base, "late", lambda s: 5), lambda: delattr(Base, "late"))


def test_a_method_of_torchs_own_modules_is_replaced() -> None:
    layer = torch.nn.Linear(2, 2)
    before = torch.nn.Linear.forward
    change = lambda: setattr(torch.nn.Linear, "forward", lambda s, x: x * 5)  # noqa: E731
    check(lambda x: layer(x), change, lambda: setattr(torch.nn.Linear, "forward", before))


def test_a_function_of_torchs_is_replaced() -> None:
    functional = torch.nn.functional
    before = functional.relu
    change = lambda: setattr(functional, "relu", lambda x: x * 0 + 5)  # noqa: E731
    check(lambda x: torch.nn.functional.relu(x - 2), change, lambda: setattr(functional, "relu", before))


# --- instance checks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask", [lambda one, kind: isinstance(one, kind), lambda one, kind: issubclass(type(one), kind)]
)
def test_a_class_is_registered_with_an_abstract_one(ask: Callable[[Any, Any], bool]) -> None:
    for calls in (1, 6):

        class Abstract(abc.ABC):  # noqa: B024
            pass

        class Plain:
            pass

        def function(x: torch.Tensor, Plain: Any = Plain, Abstract: Any = Abstract) -> torch.Tensor:
            return x * (2 if ask(Plain(), Abstract) else 3)

        compiled: Any = dovetail.compile(function, backend="aten")
        x = torch.ones(2)
        for _ in range(calls):
            assert torch.equal(compiled(x), x * 3)
        Abstract.register(Plain)
        assert torch.equal(compiled(x), x * 2)


def test_an_instance_check_of_the_users_own() -> None:
    class Meta(type):
        answer = True

        def __instancecheck__(cls, value: Any) -> bool:
            return cls.answer

    class Kind(metaclass=Meta):
        pass

    check(
        lambda x: x * (2 if isinstance(3, Kind) else 3),
        lambda: setattr(Meta, "answer", False),
        lambda: setattr(Meta, "answer", True),
    )


# --- absence elsewhere ------------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("late",)


class Colour(enum.Enum):
    RED = 1


MODULE = types.ModuleType("users_module")
MODULE.inner = types.ModuleType("inner")  # type: ignore[attr-defined]
MODULE.inner.amount = 2.0
OTHER = types.ModuleType("other")
OTHER.amount = 3.0  # type: ignore[attr-defined]
LAYER = torch.nn.Linear(2, 2)
SLOTTED = Slotted()


@functools.singledispatch
def dispatched(value: Any) -> float:
    return 2.0


def _global(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * late_global  # type: ignore[name-defined]  # noqa: F821
    except NameError:
        return x * 3


ABS = abs
ELSEWHERE: dict[str, tuple[Function, Change, Change]] = {
    "a module's attribute": (
        lambda x: x * (2 if hasattr(MODULE, "late") else 3),
        lambda: setattr(MODULE, "late", 1),
        lambda: delattr(MODULE, "late"),
    ),
    "a module in a module": (
        lambda x: x * MODULE.inner.amount,
        lambda: setattr(MODULE, "kept", MODULE.inner) or setattr(MODULE, "inner", OTHER),  # type: ignore[func-returns-value]
        lambda: setattr(MODULE, "inner", MODULE.kept),
    ),
    "a parameter's attribute": (
        lambda x: LAYER(x) * getattr(LAYER.weight, "late", 3),
        lambda: setattr(LAYER.weight, "late", 5),
        lambda: delattr(LAYER.weight, "late"),
    ),
    "a global": (_global, lambda: globals().__setitem__("late_global", 5), lambda: globals().pop("late_global")),
    "a global before a builtin": (
        lambda x: x * abs(-3),
        lambda: globals().__setitem__("abs", lambda value: 5),
        lambda: globals().pop("abs"),
    ),
    "a builtin": (
        lambda x: x * abs(-3),
        lambda: setattr(builtins, "abs", lambda value: 5),
        lambda: setattr(builtins, "abs", ABS),
    ),
    "a slot": (
        lambda x: x * (2 if hasattr(SLOTTED, "late") else 3),
        lambda: setattr(SLOTTED, "late", 1),
        lambda: delattr(SLOTTED, "late"),
    ),
    "an enum's attribute": (
        lambda x: x * (2 if hasattr(Colour, "late") else 3),
        lambda: type.__setattr__(Colour, "late", 1),
        lambda: type.__delattr__(Colour, "late"),
    ),
    "a module of the standard library": (
        lambda x: x * getattr(sys, "late", 3),
        lambda: setattr(sys, "late", 5),
        lambda: delattr(sys, "late"),
    ),
    "the level of a logger": (
        lambda x: x * (2 if logging.getLogger("dovetail.tests").isEnabledFor(logging.DEBUG) else 3),
        lambda: logging.getLogger("dovetail.tests").setLevel(logging.DEBUG),
        lambda: logging.getLogger("dovetail.tests").setLevel(logging.NOTSET),
    ),
    "the number of threads": (
        lambda x: x * torch.get_num_threads(),
        lambda: torch.set_num_threads(3),
        lambda: torch.set_num_threads(1),
    ),
    "the context of decimals": (
        lambda x: x * decimal.getcontext().prec,
        lambda: setattr(decimal.getcontext(), "prec", 5),
        lambda: setattr(decimal.getcontext(), "prec", 28),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_something_appears_or_changes_elsewhere(name: str) -> None:
    threads = torch.get_num_threads()
    try:
        check(*ELSEWHERE[name])
    finally:
        torch.set_num_threads(threads)


def test_an_implementation_is_registered_later() -> None:
    compiled: Any = dovetail.compile(lambda x: x * dispatched(3), backend="aten")
    x = torch.ones(2)
    assert torch.equal(compiled(x), x * 2)
    dispatched.register(int)(lambda value: 9.0)
    assert torch.equal(compiled(x), x * 9)


def test_an_attribute_that_native_code_computes() -> None:
    table = numpy.zeros(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * table.shape[0] * (2 if table.flags.writeable else 3)

    compiled: Any = dovetail.compile(function, backend="aten")
    x = torch.ones(2)
    assert torch.equal(compiled(x), function(x))
    table.resize(3, refcheck=False)
    assert torch.equal(compiled(x), function(x))


def test_data_in_a_class_that_changes_at_every_call_does_not_grow_entries() -> None:
    class Kind:
        count = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        Kind.count += 1
        return x * 2

    compiled: Any = dovetail.compile(function, backend="aten", dynamic=True)
    x = torch.ones(2)
    for _ in range(20):
        compiled(x)
    assert Kind.count == 20
    assert len(compiled_function(compiled).entries) <= 3


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_what_copies_leave_in_a_class_compiles_nothing_anew(copies: Callable[[Any], Any]) -> None:
    fresh: Any = type("Fresh", (Copied,), {"__module__": __name__, "twice": lambda self: self.factor * 2, "one": 1})
    globals()["Fresh"] = fresh
    compiled: Any = dovetail.compile(lambda x, item: x * item.twice() + item.one, backend="aten")
    x, item = torch.ones(2), fresh()
    for _ in range(3):
        assert torch.equal(compiled(x, item), x * 6 + 1)
        assert "__slotnames__" in vars(type(copies(item)))
    assert len(compiled.entries) == 1
    fresh.twice = lambda self: self.factor * 5
    assert torch.equal(compiled(x, item), x * 15 + 1)
    fresh.twice = property(lambda self: lambda: 7)
    assert torch.equal(compiled(x, item), x * 7 + 1)


class Copied:
    def __init__(self) -> None:
        self.factor = 3
