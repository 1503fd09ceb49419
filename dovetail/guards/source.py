"""Sources: how to find a value again at the next call, as a path from the callee, the arguments or a pinned object.

A source is data. :meth:`Source.fetch` walks the path and :meth:`Source.expression` writes one step of it for a generated check;
both go by :mod:`dovetail.guards.reading`, so that none of the program's code runs. Where a value cannot be had that way,
fetching raises one of :data:`FETCH_ERRORS`, which a check takes as a miss.

A rule that reads values in a way of its own adds a class derived from :class:`Step` that implements ``name`` and ``read``; the
other methods have defaults that are right for every step.

>>> source = ItemSource(ArgumentSource(0, "L['x']"), "k")
>>> source.name
"L['x']['k']"
>>> source.fetch(None, ({"k": 3},), {})
3
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dovetail.guards.reading import (
    FETCH_ERRORS,
    Key,
    class_order,
    instance_dict,
    is_plain_instance,
    read_attribute,
    read_entry,
    read_gradient,
    read_item,
)

if TYPE_CHECKING:
    from dovetail.guards.writer import Writer

__all__ = ["FETCH_ERRORS"]

#: The tables of ``nn.Module`` whose items a user reads as attributes.
_MODULE_TABLES = frozenset(map(Key, ("_parameters", "_buffers", "_modules")))
#: Filling a tensor of float32 with more is an error in eager, also where nobody reads the tensor.
LARGEST_FLOAT: float = torch.finfo(torch.float32).max

_FUNCTION_SLOTS = {"__code__", "__defaults__", "__kwdefaults__", "__closure__", "__globals__", "__dict__", "__name__"}
_SLOTS: dict[Any, set[str]] = {types.FunctionType: _FUNCTION_SLOTS, types.MethodType: {"__func__", "__self__"}}
_GONE = object()


class Pinned:
    """An object that an entry holds on to, compared by identity, with the name a user knows it by."""

    __slots__ = ("display", "value")

    def __init__(self, value: Any, display: str) -> None:
        self.value = value
        self.display = display

    def __eq__(self, other: object) -> bool:
        return type(other) is Pinned and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"Pinned({self.display})"


@dataclass(frozen=True)
class Source:
    """The way to find a value again. Roots have no ``base``."""

    #: Whether each reading makes another tensor in the same memory, so that the identity of the value says nothing.
    makes_new: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The text that a user reads, such as ``L['x'].weight``; a field ``display``, where it does not follow from the others."""
        return self.display  # type: ignore[attr-defined, no-any-return]

    @property
    def parent(self) -> Source | None:
        """The source that this one starts from."""
        return getattr(self, "base", None)

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The value now; raises one of :data:`FETCH_ERRORS` if there is none."""
        raise NotImplementedError

    def expression(self, writer: Writer, base: str) -> str:
        """Python that gives the value in a generated check, from ``base``, the variable with the parent's value."""
        return f"{writer.constant(self.fetch, 'fetch_')}(callee, args, kwargs)"

    def conditions(self, writer: Writer, variable: str) -> Sequence[str]:
        """Conditions on the value without which the steps below this one would not be sound."""
        return ()

    def memory(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors whose memory a tensor that is read here stands for."""
        return (value,)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class CalleeSource(Source):
    """The callable that was compiled."""

    @property
    def name(self) -> str:
        return "self"

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return callee

    def expression(self, writer: Writer, base: str) -> str:
        return "callee"


@dataclass(frozen=True)
class ArgumentSource(Source):
    """A positional argument."""

    index: int
    display: str = field(compare=False)

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args[self.index]

    def expression(self, writer: Writer, base: str) -> str:
        return f"args[{self.index}]"


@dataclass(frozen=True)
class KeywordSource(Source):
    """A keyword argument."""

    keyword: str
    display: str = field(compare=False)

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[self.keyword]

    def expression(self, writer: Writer, base: str) -> str:
        return f"kwargs[{self.keyword!r}]"


@dataclass(frozen=True)
class PinnedSource(Source):
    """An object that the entry holds strongly: a globals dictionary, a class, a Python module."""

    pinned: Pinned

    @property
    def name(self) -> str:
        return self.pinned.display

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.pinned.value

    def expression(self, writer: Writer, base: str) -> str:
        return writer.constant(self.pinned.value, "pinned_")


@dataclass(frozen=True)
class ComputedSource(Source):
    """A number that a pure function computes from other numbers; found again by computing it again.

    ``arguments`` are numbers and at least one source of a number. A function that reads a tensor's data has ``reads_data = True``.

    >>> half = ComputedSource(abs, (ArgumentSource(0, "L['n']"),), "abs(n)")
    >>> half.fetch(None, (-9,), {})
    9
    """

    function: Any
    arguments: tuple[Any, ...]
    display: str = field(compare=False)

    @property
    def parent(self) -> Source | None:
        """The first number that it is computed from."""
        return next(item for item in self.arguments if isinstance(item, Source))

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        values = [item.fetch(callee, args, kwargs) if isinstance(item, Source) else item for item in self.arguments]
        try:
            return self.function(*values)
        except ArithmeticError as error:
            raise ValueError(f"{self.display} cannot be computed any more: {error}") from error


@dataclass(frozen=True)
class Step(Source):
    """A source that is one step away from another one."""

    base: Source

    def read(self, value: Any) -> Any:
        """Take the step: from the base's value to this source's value."""
        raise NotImplementedError

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.read(self.base.fetch(callee, args, kwargs))

    def expression(self, writer: Writer, base: str) -> str:
        return f"{writer.constant(self.read, 'read_')}({base})"


@dataclass(frozen=True)
class AttributeSource(Step):
    """``getattr`` without the user's code; see :func:`read_attribute`."""

    attribute: str

    @property
    def name(self) -> str:
        return f"{self.base.name}.{self.attribute}"

    def read(self, value: Any) -> Any:
        return read_attribute(value, self.attribute)

    def expression(self, writer: Writer, base: str) -> str:
        kind = writer.tree.known_type(self.base)
        if self.attribute in _SLOTS.get(kind, ()):
            return f"{base}.{self.attribute}"
        owner = writer.tree.known_class(self.base)
        if owner is not None and self.attribute == "__mro__":
            return f"{writer.constant(class_order, 'read_order_')}({writer.constant(owner, 'class_')})"
        found = writer.class_attribute(self, base)
        if found is not None:
            return found
        module = writer.tree.known_object(self.base)
        if type(module) is types.ModuleType and self.attribute in instance_dict(module):
            writer.require(f"type({base}) is {writer.constant(types.ModuleType, 'type_')}")
            return f"{writer.constant(instance_dict(module), 'module_')}[{self.attribute!r}]"
        own = writer.tree.class_of_table(self)
        return writer.class_table(own) if own is not None else super().expression(writer, base)


@dataclass(frozen=True)
class InstanceDictSource(Step):
    """An object's ``__dict__``."""

    @property
    def name(self) -> str:
        return f"{self.base.name}.__dict__"

    def read(self, value: Any) -> Any:
        return instance_dict(value)

    def expression(self, writer: Writer, base: str) -> str:
        kind = writer.tree.known_type(self.base)
        if kind is not None and not issubclass(kind, type):
            if is_plain_instance(kind):
                return f"{base}.__dict__"
            return f"{writer.constant(object.__getattribute__, 'own_attribute_')}({base}, '__dict__')"
        owner = writer.tree.class_of_table(self)
        return writer.class_table(owner) if owner is not None else super().expression(writer, base)

    def conditions(self, writer: Writer, variable: str) -> Sequence[str]:
        return (f"type({variable}) is dict",) if writer.tree.is_object_dict(self) else ()


@dataclass(frozen=True, init=False)
class ItemSource(Step):
    """An item of a list, tuple or dictionary. The key is compared as a constant if it is one, else by identity.

    A key that is an object of the program, such as a parameter in the state of an optimizer, is held weakly. The hash is kept.

    >>> ItemSource(InstanceDictSource(ArgumentSource(0, "L['m']")), "scale").name
    "L['m'].scale"
    """

    held: Key

    def __init__(self, base: Source, key: Any) -> None:
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "held", Key(key))
        object.__setattr__(self, "_hash", hash((base, self.held)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    @property
    def key(self) -> Any:
        """The key; KeyError if the program has let it go."""
        return self.held.value

    @functools.cached_property
    def name(self) -> str:
        owner = self.base
        if self.held.is_object:
            return f"{owner.name}[<{self.held.display.removeprefix('a ').removesuffix(' object')}>]"
        key = self.key
        if type(key) is str:
            if isinstance(owner, InstanceDictSource):
                return f"{owner.base.name}.{key}"
            if (
                isinstance(owner, ItemSource)
                and isinstance(owner.base, InstanceDictSource)
                and owner.held in _MODULE_TABLES
            ):
                module = owner.base.base.name
                return f"{module}[{key}]" if key.isdigit() else f"{module}.{key}"
        return f"{owner.name}[{key!r}]"

    def read(self, value: Any) -> Any:
        return read_item(value, self.key)

    def expression(self, writer: Writer, base: str) -> str:
        parent, tree = self.base, writer.tree
        kind = tree.known_type(parent)
        if kind in (dict, list, tuple) or tree.is_object_dict(parent) or tree.class_of_table(parent) is not None:
            return f"{base}[{self._written_key(writer)}]"
        if kind is not None:
            for builtin, read in ((dict, read_entry), (list, list.__getitem__), (tuple, tuple.__getitem__)):
                if issubclass(kind, builtin):
                    return f"{writer.constant(read, f'{builtin.__name__}_item_')}({base}, {self._written_key(writer)})"
        elif isinstance(parent, AttributeSource) and parent.attribute == "__defaults__" and type(self.key) is int:
            return f"{writer.constant(tuple.__getitem__, 'tuple_item_')}({base}, {self.key})"
        elif not self.held.is_object and type(self.key) is str and not isinstance(parent, InstanceDictSource):
            return f"{writer.constant(read_entry, 'dict_item_')}({base}, {self._written_key(writer)})"
        return super().expression(writer, base)

    def _written_key(self, writer: Writer) -> str:
        if not self.held.is_weak:
            return writer.literal(self.key)
        reference, gone = writer.constant(self.held.read, "key_"), writer.constant(_GONE, "gone_")
        # A key that is gone must not be looked up as None.
        return f"key if (key := {reference}()) is not None else {gone}"


@dataclass(frozen=True)
class CellSource(Step):
    """The content of a closure cell of a function."""

    index: int

    @property
    def name(self) -> str:
        return f"{self.cell.name}.cell_contents"

    @property
    def cell(self) -> Source:
        """The source of the cell itself, full or empty."""
        return ItemSource(AttributeSource(self.base, "__closure__"), self.index)

    def read(self, value: Any) -> Any:
        return read_attribute(value, "__closure__")[self.index].cell_contents

    def expression(self, writer: Writer, base: str) -> str:
        if writer.tree.known_type(self.base) is types.FunctionType:
            return f"{base}.__closure__[{self.index}].cell_contents"
        return super().expression(writer, base)


@dataclass(frozen=True)
class GradSource(Step):
    """A tensor's ``.grad``."""

    @property
    def name(self) -> str:
        return f"{self.base.name}.grad"

    def read(self, value: Any) -> Any:
        return read_gradient(value)

    def expression(self, writer: Writer, base: str) -> str:
        return f"{writer.constant(read_gradient, 'read_gradient_')}({base})"


@dataclass(frozen=True)
class NumberSource(Step):
    """A whole number as the second size of an empty tensor, so that a symbolic number is an input like any other.

    Reading another value than a whole number of at least ``least`` raises ValueError: it has an entry of its own.
    """

    least: int = 2

    @property
    def name(self) -> str:
        return f"{self.base.name}<number>"

    def read(self, value: Any) -> Any:
        if type(value) is not int or not self.least <= value < 1 << 62:
            raise ValueError(f"{value!r} is no whole number of at least {self.least}")
        # Whether such a tensor is contiguous depends on no symbol, even where it may be 0.
        return torch.empty_strided((0, value), (1, 1), dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class FloatSource(Step):
    """A float as a tensor without dimensions, so that a symbolic float is an input like any other.

    Reading zero (whose sign a symbol would lose), a number beyond float32, an infinity, nan or something else raises ValueError:
    these have entries of their own.
    """

    @property
    def name(self) -> str:
        return f"{self.base.name}<number>"

    def read(self, value: Any) -> Any:
        if type(value) is not float or value == 0.0 or not abs(value) <= LARGEST_FLOAT:
            raise ValueError(f"{value!r} is no float other than zero that a float32 can hold")
        return torch.tensor(value, dtype=torch.float64, device="cpu")
