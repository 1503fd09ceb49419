"""Special methods of builtin classes called by name write to the program's objects at every call, as their statements do."""

from __future__ import annotations

import array
import collections
import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

np = pytest.importorskip("numpy")


class Plain:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def __repr__(self) -> str:
        return f"Plain({self.count})"


WRITES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "ndarray.__iadd__": (lambda: np.arange(4.0), lambda n: n.__iadd__(1)),
    "ndarray.__imul__ unbound": (lambda: np.arange(4.0), lambda n: np.ndarray.__imul__(n, 2)),
    "ndarray.__setitem__": (lambda: np.arange(4.0), lambda n: n.__setitem__(0, n[1] + 1)),
    "ndarray +=": (lambda: np.arange(4.0), lambda n: operator.iadd(n, 1)),
    "deque.__iadd__": (lambda: collections.deque(maxlen=2), lambda d: d.__iadd__([len(d)])),
    "deque.__iadd__ unbound": (lambda: collections.deque(maxlen=2), lambda d: collections.deque.__iadd__(d, [len(d)])),
    "deque.__setitem__": (lambda: collections.deque([1, 2]), lambda d: d.__setitem__(0, d[0] + 1)),
    "deque.__delitem__": (lambda: collections.deque(range(9)), lambda d: d.__delitem__(0)),
    "bytearray.__iadd__": (lambda: bytearray(b"a"), lambda b: b.__iadd__(b"b")),
    "array.__setitem__": (lambda: array.array("i", [1]), lambda a: a.__setitem__(0, a[0] + 1)),
    "list.__iadd__": (lambda: [1], lambda items: items.__iadd__([len(items)])),
    "list.__init__": (lambda: [1], lambda items: items.__init__([len(items), 2])),  # type: ignore[misc]
    "dict.__ior__": (dict, lambda table: table.__ior__({len(table): 1})),
    "set.__isub__": (lambda: set(range(9)), lambda items: items.__isub__({len(items) - 1})),
    "set.__init__ unbound": (lambda: {1, 2}, lambda items: set.__init__(items, {len(items)})),
    "object.__setattr__": (Plain, lambda item: object.__setattr__(item, "count", item.count + 1)),
    "own __init__": (Plain, lambda item: item.__init__(item.count + 2)),  # type: ignore[misc]
    "own __init__ unbound": (Plain, lambda item: Plain.__init__(item, item.count + 3)),
    "Counter.__iadd__": (collections.Counter, lambda c: c.__iadd__(collections.Counter("ab"))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.filterwarnings("ignore")
def test_every_call_writes(name: str) -> None:
    make, write = WRITES[name]

    def run(wrap: Callable[[Any], Any]) -> list[str]:
        owner, found = make(), []

        def program(x: torch.Tensor) -> torch.Tensor:
            write(owner)
            return x * 2

        call = wrap(program)
        for _ in range(3):
            call(torch.ones(2))
            found.append(repr(owner))
        return found

    assert run(lambda f: dovetail.compile(f, backend="aten")) == run(lambda f: f)


class Wrapped:
    """Hands every name that it has not itself to another object, ``__dict__`` among them."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        object.__setattr__(self, "held", held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.held, name, value)


class WrappedWithAttributes(Wrapped):
    """The same with a ``__dict__`` of its own."""


@pytest.mark.parametrize("kind", [Wrapped, WrappedWithAttributes])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_an_object_that_hands_names_on_is_built_from_its_own_attributes(kind: type, breaks: bool) -> None:
    def run(wrap: Callable[[Any], Any]) -> Any:
        held = Plain()

        def program(x: torch.Tensor) -> Any:
            outer = kind(held)
            y = x * outer.count
            outer.count = outer.count + 1
            if breaks:
                sys.stdout.write("")
            return y + outer.count, outer

        result, outer = wrap(program)(torch.ones(2))
        own = list(object.__getattribute__(outer, "__dict__")) if kind.__dictoffset__ else []
        return result.tolist(), type(outer), outer.held is held, vars(held), own

    assert run(lambda f: dovetail.compile(f, backend="aten")) == run(lambda f: f)


def test_the_errors_of_super_are_pythons() -> None:
    class Base:
        def nothing(*args: Any) -> Any:
            return super()  # type: ignore[misc]

    def function(x: torch.Tensor) -> Any:
        said = []
        for arguments in ((int, int, int), (3,), (Base, 3)):
            try:
                super(*arguments)
            except TypeError as error:
                said.append(str(error))
        try:
            Base.nothing()
        except RuntimeError as error:
            said.append(str(error))
        return x * len(said), said

    x = torch.ones(2)
    same(function(x), dovetail.compile(function, backend="aten", fullgraph=True)(x))


class OddDictionary:
    """What it says of its dictionary is not what it has."""

    __dict__ = property(lambda self: "odd")  # type: ignore[assignment]


def test_a_dictionary_that_is_a_property_is_none_of_the_objects(capsys: pytest.CaptureFixture[str]) -> None:
    odd = OddDictionary()

    def function(x: torch.Tensor) -> Any:
        print(odd.__dict__, x.sum().item())
        return x * 2

    x = torch.ones(2)
    same(function(x), dovetail.compile(function, backend="aten")(x))
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
