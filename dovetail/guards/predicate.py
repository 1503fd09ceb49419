"""Predicates: the questions that guards ask of values, answered without running any of the program's code.

A predicate is data. It answers in three ways that must agree: :meth:`Predicate.holds` on a value, :meth:`Predicate.condition` as
Python in a generated check, :meth:`Predicate.failures` as sentences. A rule that needs a question of its own derives a class that
implements ``holds``, ``describe`` and ``failure``; the other methods have defaults that are right for every predicate.

>>> Equals(0.0).holds(-0.0), Equals(1).holds(True), TypeIs(list).holds([1, 2])
(False, False, True)
"""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dovetail.guards.reading import Holder, constant_key, reference, short
from dovetail.guards.source import Source

if TYPE_CHECKING:
    from dovetail.guards.tensor_predicate import TensorFacts
    from dovetail.guards.writer import Writer


_SIMPLE_TYPES = frozenset({int, str, bytes, torch.device})
SINGLETON_TYPES = frozenset(
    {bool, type(None), type(Ellipsis), type(NotImplemented), torch.dtype, torch.layout, torch.memory_format}
)
#: Tuples up to this length are compared item by item in a generated check.
_INLINED_ITEMS = 8


@dataclass(frozen=True)
class Call:
    """A call that is checked: the callee, its arguments, and the facts of all tensor inputs at capture."""

    callee: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    facts: tuple[TensorFacts, ...]

    def fetch(self, source: Source) -> Any:
        """The value at a source now."""
        return source.fetch(self.callee, self.args, self.kwargs)


@dataclass(frozen=True)
class Predicate:
    """A question that a guard asks of the value at its source."""

    #: Whether it is asked before the other guards of the same value, which may rely on the answer.
    asked_first: ClassVar[bool] = False

    def holds(self, value: Any) -> bool:
        """Whether the value passes; runs none of the user's code."""
        raise NotImplementedError

    def describe(self, name: str) -> str:
        """The question as a statement about the value called ``name``."""
        raise NotImplementedError

    def failure(self, name: str, value: Any) -> str:
        """A sentence on a value that did not pass."""
        raise NotImplementedError

    def condition(self, writer: Writer, source: Source, variable: str) -> str:
        """Python that is true if the value in ``variable``, which is from ``source``, passes."""
        return f"{writer.constant(self.holds, 'holds_')}({variable})"

    def failures(self, source: Source, call: Call) -> list[str]:
        """Sentences on why the value at ``source`` does not pass in this call; empty if it does."""
        value = call.fetch(source)
        return [] if self.holds(value) else [self.failure(source.name, value)]


# --- one object -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TypeIs(Predicate):
    """The type is exactly this one."""

    asked_first: ClassVar[bool] = True
    cls: type

    def holds(self, value: Any) -> bool:
        return type(value) is self.cls

    def describe(self, name: str) -> str:
        return f"type({name}) is {self.cls.__qualname__}"

    def failure(self, name: str, value: Any) -> str:
        return f"type of `{name}` was {self.cls.__qualname__}, is {type(value).__qualname__}"

    def condition(self, writer: Writer, source: Source, variable: str) -> str:
        return f"type({variable}) is {writer.constant(self.cls, 'type_')}"


class Identity(Predicate):
    """The value is this very object, which is held weakly where the program may let go of it; see :func:`reference`.

    >>> Identity(len).holds(len)
    True
    """

    __slots__ = ("address", "display", "read")

    asked_first: ClassVar[bool] = True
    address: int
    display: str
    read: Callable[[], Any]

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "address", id(value))
        object.__setattr__(self, "display", short(value))
        object.__setattr__(self, "read", reference(value))

    def __eq__(self, other: object) -> bool:
        # A dead weak reference leaves an address that another object may get.
        return type(other) is Identity and self.address == other.address and self.read() is other.read()

    def __hash__(self) -> int:
        return hash(self.address)

    def __repr__(self) -> str:
        return f"Identity({self.display})"

    @property
    def is_weak(self) -> bool:
        """Whether the object may go away."""
        return not isinstance(self.read, Holder)

    @property
    def is_dead(self) -> bool:
        """Whether the object has gone away, so that no value can pass any more."""
        return self.is_weak and self.read() is None

    def holds(self, value: Any) -> bool:
        return self.read() is value and (value is not None or not self.is_weak)

    def describe(self, name: str) -> str:
        return f"{name} is the same object, {self.display}"

    def failure(self, name: str, value: Any) -> str:
        now = short(value)
        return f"`{name}` was {self.display}, is {f'another one ({now})' if now == self.display else now}"

    def condition(self, writer: Writer, source: Source, variable: str) -> str:
        if self.is_weak:
            return f"{variable} is not None and {writer.constant(self.read, 'object_')}() is {variable}"
        return f"{variable} is {_written_object(writer, self.read())}"


@dataclass(frozen=True)
class Equals(Predicate):
    """The value is a constant of the same type that is equal; nan equals nan, 0.0 is not -0.0.

    Takes numbers, strings, bytes, bools, None, enum members, torch's dtypes, devices, layouts, memory formats and
    sizes, slices, ranges, and tuples and frozensets of these; TypeError for anything else.
    """

    value: Any = field(compare=False)
    key: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", constant_key(self.value))

    def holds(self, value: Any) -> bool:
        try:
            return constant_key(value) == self.key
        except TypeError:
            return False

    def describe(self, name: str) -> str:
        return f"{name} is {short(self.value)}"

    def failure(self, name: str, value: Any) -> str:
        then, now = short(self.value), short(value)
        if then == now:
            return f"`{name}` was {then}, is {now} of type {type(value).__qualname__}"
        return f"`{name}` was {then}, is {now}"

    def condition(self, writer: Writer, source: Source, variable: str) -> str:
        return _written_comparison(writer, self.value, variable)


def _written_object(writer: Writer, value: Any) -> str:
    """None, True and False as they are, every other object by name."""
    return repr(value) if value is None or type(value) is bool else writer.constant(value, "object_")


def _written_comparison(writer: Writer, value: Any, variable: str) -> str:
    """A comparison with a constant that runs no code but that of built-in types."""
    kind = type(value)
    if kind in SINGLETON_TYPES or issubclass(kind, enum.Enum):
        return f"{variable} is {_written_object(writer, value)}"
    same_type = f"type({variable}) is {writer.constant(kind, 'type_')}"
    if kind in _SIMPLE_TYPES:
        return f"{same_type} and {variable} == {writer.literal(value)}"
    if kind is float:
        if math.isnan(value):
            return f"{same_type} and {variable} != {variable}"
        if value != 0.0:
            return f"{same_type} and {variable} == {writer.constant(value)}"
    if (kind is tuple or kind is torch.Size) and len(value) <= _INLINED_ITEMS:
        items = [_written_comparison(writer, item, f"{variable}[{position}]") for position, item in enumerate(value)]
        return " and ".join([same_type, f"len({variable}) == {len(value)}", *items])
    return f"{writer.constant(constant_key, 'key_of_')}({variable}) == {writer.constant(constant_key(value), 'key_')}"


@dataclass(frozen=True)
class Answers(Predicate):
    """A function answers this constant about the value: ``function(value, *arguments) == answer``.

    For state that only the function itself can read: the classes registered as subclasses, the level from which a logger writes.

    >>> Answers(issubclass, (int,), True).holds(bool)
    True
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    answer: Any

    def holds(self, value: Any) -> bool:
        return constant_key(self.function(value, *self.arguments)) == constant_key(self.answer)

    def _call(self, name: str) -> str:
        return f"{self.function.__name__}({', '.join([name, *map(short, self.arguments)])})"

    def describe(self, name: str) -> str:
        return f"{self._call(name)} is {short(self.answer)}"

    def failure(self, name: str, value: Any) -> str:
        now = short(self.function(value, *self.arguments))
        return f"`{self._call(name)}` was {short(self.answer)}, is {now}"


@dataclass(frozen=True)
class HasNoSlot(Predicate):
    """An object's slot is empty; ``slot`` is the descriptor in its class."""

    slot: types.MemberDescriptorType | types.GetSetDescriptorType

    def holds(self, value: Any) -> bool:
        try:
            self.slot.__get__(value)
        except AttributeError:
            return True
        return False

    def describe(self, name: str) -> str:
        return f"{name} has no {self.slot.__name__}"

    def failure(self, name: str, value: Any) -> str:
        return f"`{name}` had no {self.slot.__name__}, and has one now"


@dataclass(frozen=True)
class Unbound(Predicate):
    """A closure cell is empty; see :attr:`CellSource.cell`."""

    def holds(self, value: Any) -> bool:
        try:
            types.CellType.cell_contents.__get__(value)  # type: ignore[attr-defined]
        except ValueError:
            return True
        return False

    def describe(self, name: str) -> str:
        return f"{name} is unbound"

    def failure(self, name: str, value: Any) -> str:
        return f"`{name}` was unbound, and has a value now"


# --- several objects --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relation(Predicate):
    """A predicate on the value and those at other sources, checked with all in hand."""

    #: Whether all values are one object; else they are all different ones.
    is_same: ClassVar[bool]
    others: tuple[Source, ...]

    def holds(self, value: Any) -> bool:
        raise TypeError("a relation needs the values at all of its sources")

    def failures(self, source: Source, call: Call) -> list[str]:
        values = [call.fetch(source), *map(call.fetch, self.others)]
        holds = len({*map(id, values)}) == (1 if self.is_same else len(values))
        return [] if holds else [self.failure(source.name, values[0])]


@dataclass(frozen=True)
class SameObject(Relation):
    """The value is the same object as those at other sources."""

    is_same: ClassVar[bool] = True

    def describe(self, name: str) -> str:
        return f"{name} is {' and '.join(other.name for other in self.others)}"

    def failure(self, name: str, value: Any) -> str:
        listed = ", ".join(f"`{other.name}`" for other in self.others)
        return f"`{name}` and {listed} were one object, and are two now"


@dataclass(frozen=True)
class Distinct(Relation):
    """The value and those at other sources are objects of their own."""

    is_same: ClassVar[bool] = False

    def describe(self, name: str) -> str:
        return f"{name} is none of {', '.join(other.name for other in self.others)}"

    def failure(self, name: str, value: Any) -> str:
        listed = ", ".join(f"`{other.name}`" for other in self.others)
        return f"`{name}` and {listed} were different objects, and two of them are one now"
