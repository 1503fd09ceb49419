"""How to find a value again at the next call: a path from the callee, the arguments or a pinned object.

A source is data. :meth:`Source.fetch` walks it without running the user's code: no ``__getattr__``, no ``__getitem__``
of a subclass, no property. Where a value cannot be had that way, fetching raises one of :data:`FETCH_ERRORS`, which a
checker takes as a miss.

>>> source = ItemSource(ArgumentSource(0, "L['x']"), "k")
>>> source.name
"L['x']['k']"
>>> source.fetch(None, ({"k": 3},), {})
3
"""

from __future__ import annotations

import collections
import enum
import itertools
import math
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

FETCH_ERRORS: tuple[type[Exception], ...] = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError)
"""What fetching a value may raise; a checker takes any of them as a miss."""

MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""The tables of ``nn.Module`` whose items a user reads as attributes."""

_MISSING = object()
_HEAP_TYPE = 1 << 9
# Descriptors made in C, whose __get__ runs nobody's Python code.
_DATA_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_METHOD_DESCRIPTORS = (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# What a class attribute of these types gives when it is read on the class.
_RETURN_THEMSELVES = frozenset({*_METHOD_DESCRIPTORS, *_DATA_DESCRIPTORS, property})
_tuple_getter = type(collections.namedtuple("_Pair", "a b").a)  # type: ignore[attr-defined]
class_order: Any = type.__dict__["__mro__"].__get__
"""The class and its bases in the order in which they are searched, whatever its metaclass says; one tuple until it changes."""
_type_dict = type.__dict__["__dict__"].__get__
_PLAIN_KEYS = frozenset({bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented)})
_TORCH_KEYS = frozenset({torch.dtype, torch.device, torch.memory_format, torch.layout})


def constant_key(value: object) -> tuple[Any, ...]:
    """A hashable key that two constants share exactly if they are of one type and equal; TypeError for other values.

    Floats are told apart as a program could: 0.0 is not -0.0, and nan is nan.

    >>> constant_key(1) == constant_key(True), constant_key(float("nan")) == constant_key(float("nan"))
    (False, True)
    """
    kind = type(value)
    if kind in _PLAIN_KEYS or kind in _TORCH_KEYS:
        return kind, value
    if kind is float:
        if math.isnan(value):  # type: ignore[arg-type]
            return kind, "nan"
        return kind, value, math.copysign(1.0, value)  # type: ignore[arg-type]
    if kind is tuple or kind is torch.Size:
        return kind, tuple([constant_key(item) for item in value])  # type: ignore[attr-defined]
    if kind is complex:
        return kind, constant_key(value.real), constant_key(value.imag)  # type: ignore[attr-defined]
    if kind is frozenset:
        # In order: equal sets may be gone through in different orders.
        return kind, tuple([constant_key(item) for item in value])  # type: ignore[attr-defined]
    if kind is slice or kind is range:
        parts = (value.start, value.stop, value.step)  # type: ignore[attr-defined]
        return kind, tuple([constant_key(item) for item in parts])
    if issubclass(kind, enum.Enum):
        # Members are singletons; comparing them could run the user's __eq__.
        return "enum", id(value)
    raise TypeError(f"a {kind.__qualname__} is not a constant")


def item_key(key: object) -> tuple[Any, ...]:
    """The key by which a dictionary's key is compared: as a constant if it is one, else by identity."""
    try:
        return constant_key(key)
    except TypeError:
        return "object", id(key)


def plain_length(value: Any) -> int:
    """``len`` of a built-in container, also of a subclass, without running a ``__len__`` of the user's."""
    kind: type = type(value)
    for builtin in (list, tuple, dict, set, frozenset, str, bytes, range, collections.deque):
        if issubclass(kind, builtin):
            return builtin.__len__(value)
    raise TypeError(f"a {kind.__qualname__} has no plain length")


def plain_items(value: Any) -> list[Any]:
    """The items of a list, tuple, deque or set, also of a subclass, without running an ``__iter__`` of the user's."""
    kind: type = type(value)
    for builtin in (list, tuple, set, frozenset, collections.deque):
        if issubclass(kind, builtin):
            return [*builtin.__iter__(value)]
    raise TypeError(f"a {kind.__qualname__} has no plain items")


def plain_keys(value: Any) -> Iterator[Any]:
    """The keys of a dictionary in its own order, without running the user's code."""
    kind = type(value)
    if issubclass(kind, collections.OrderedDict):
        # After move_to_end the order of an OrderedDict is no longer that of the dictionary below it.
        return collections.OrderedDict.__iter__(value)
    return dict.__iter__(value)


def plain_contains(container: Any, key: object) -> bool:
    """Whether a dictionary or set has the key, without running a ``__contains__`` of the user's."""
    kind: type = type(container)
    if issubclass(kind, dict):
        return dict.__contains__(container, key)
    if issubclass(kind, set):
        return set.__contains__(container, key)
    if issubclass(kind, frozenset):
        return frozenset.__contains__(container, key)
    if kind is types.MappingProxyType:
        return key in container
    raise TypeError(f"a {kind.__qualname__} has no keys")


_ABSENT: Any = object()


def read_entry(container: dict[Any, Any], key: Any) -> Any:
    """What a dictionary holds under a key. A ``__missing__`` does not run: that of a ``defaultdict`` would add the key.

    >>> table = collections.defaultdict(list)
    >>> read_entry(table, "k")
    Traceback (most recent call last):
        ...
    KeyError: 'k'
    >>> len(table)
    0
    """
    value = dict.get(container, key, _ABSENT)
    if value is _ABSENT:
        raise KeyError(key)
    return value


def read_item(container: Any, key: Any) -> Any:
    """One item of a list, tuple, deque or dictionary, also of a subclass, without running a ``__getitem__`` of the user's."""
    kind: type = type(container)
    if issubclass(kind, dict):
        return read_entry(container, key)
    if issubclass(kind, list):
        return list.__getitem__(container, key)
    if issubclass(kind, tuple):
        return tuple.__getitem__(container, key)
    if issubclass(kind, collections.deque):
        return collections.deque.__getitem__(container, key)
    if kind is types.MappingProxyType:
        return container[key]
    raise TypeError(f"a {kind.__qualname__} has no plain items")


def read_key(container: object, position: int) -> Any:
    """The key at a position of a dictionary; IndexError if there are fewer."""
    for key in itertools.islice(plain_keys(container), position, None):
        return key
    raise IndexError(f"the dictionary has no key number {position}")


def _in_class(kind: type, name: str) -> Any:
    for owner in class_order(kind):
        found = _type_dict(owner).get(name, _MISSING)
        if found is not _MISSING:
            return found
    return _MISSING


def instance_dict(value: object) -> Any:
    """The ``__dict__`` of an object; AttributeError if it has none."""
    return object.__getattribute__(value, "__dict__") if not issubclass(type(value), type) else _type_dict(value)


def is_heap_type(kind: type) -> bool:
    """Whether a class was made in Python, or could have been."""
    return bool(kind.__flags__ & _HEAP_TYPE)


def is_mutable_type(kind: type) -> bool:
    """Whether an object of this type may get another type: it is of a class made in Python, and no class itself."""
    return is_heap_type(kind) and not issubclass(kind, type)


def has_plain_dict(kind: type) -> bool:
    """Whether :func:`instance_dict` of an instance is the dictionary that Python keeps for it, not one of the user's making."""
    if not is_mutable_type(kind) or issubclass(kind, torch.Tensor) or not kind.__dictoffset__:
        return False
    return type(_in_class(kind, "__dict__")) is types.GetSetDescriptorType


def class_dict(kind: type) -> Any:
    """A live view on the class's own dictionary, whatever its metaclass says."""
    return _type_dict(kind)


def returns_itself(value: object) -> bool:
    """Whether a class attribute with this value is given as it is when it is read on the class: a function, a property."""
    return type(value) in _RETURN_THEMSELVES


def read_attribute(value: Any, name: str) -> Any:
    """``getattr`` without the user's code: slots, C descriptors, instance and class attributes, methods.

    A property or another descriptor written in Python raises AttributeError.

    >>> read_attribute(read_attribute, "__code__") is read_attribute.__code__
    True
    """
    kind = type(value)
    found = _in_class(kind, name)
    if type(found) in _DATA_DESCRIPTORS or type(found) is _tuple_getter:
        return found.__get__(value, kind)
    if issubclass(kind, type):
        own = _in_class(value, name)
        if own is not _MISSING and _in_class(type(found), "__set__") is _MISSING:
            if type(own) is staticmethod:
                return own.__func__
            if type(own) is classmethod:
                return types.MethodType(own.__func__, value)
            if type(own) in _RETURN_THEMSELVES or _in_class(type(own), "__get__") is _MISSING:
                return own
            raise AttributeError(f"reading {name!r} of the class {value.__qualname__} would run the user's code")
    elif _in_class(type(found), "__set__") is _MISSING:
        try:
            table = object.__getattribute__(value, "__dict__")
        except AttributeError:
            table = {}
        if plain_contains(table, name):
            return read_item(table, name)
    if found is _MISSING:
        raise AttributeError(f"a {kind.__qualname__} object has no attribute {name!r}")
    if type(found) in _METHOD_DESCRIPTORS:
        return found.__get__(value, kind)
    if type(found) is staticmethod:
        return found.__func__
    if type(found) is classmethod:
        return types.MethodType(found.__func__, kind)
    if _in_class(type(found), "__get__") is not _MISSING:
        raise AttributeError(f"reading {name!r} of a {kind.__qualname__} object would run the user's code")
    return found


def read_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor.grad`` without the warning for tensors that are no leaves."""
    if not tensor.is_leaf and not tensor.retains_grad:
        return None
    return tensor.grad


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
    """How to find a value again. Roots have no ``base``."""

    @property
    def name(self) -> str:
        """What a user reads, such as ``L['x'].weight``."""
        raise NotImplementedError

    @property
    def parent(self) -> Source | None:
        """The source that this one starts from."""
        return getattr(self, "base", None)

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The value now; raises one of :data:`FETCH_ERRORS` if there is none."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Root(Source):
    """A source that starts at the call itself."""

    @property
    def base(self) -> Source | None:
        """None: a root starts from nothing else."""
        return None


@dataclass(frozen=True)
class CalleeSource(Root):
    """The callable that was compiled."""

    @property
    def name(self) -> str:
        return "self"

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return callee


@dataclass(frozen=True)
class ArgumentSource(Root):
    """A positional argument."""

    index: int
    display: str = field(compare=False)

    @property
    def name(self) -> str:
        return self.display

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args[self.index]


@dataclass(frozen=True)
class KeywordSource(Root):
    """A keyword argument."""

    keyword: str
    display: str = field(compare=False)

    @property
    def name(self) -> str:
        return self.display

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[self.keyword]


@dataclass(frozen=True)
class PinnedSource(Root):
    """An object that the entry holds strongly: a globals dictionary, a class, a Python module."""

    pinned: Pinned

    @property
    def name(self) -> str:
        return self.pinned.display

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.pinned.value


@dataclass(frozen=True)
class Step(Source):
    """A source that is one step away from another one."""

    base: Source

    def read(self, value: Any) -> Any:
        """The step itself: from the base's value to this source's value."""
        raise NotImplementedError

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.read(self.base.fetch(callee, args, kwargs))


@dataclass(frozen=True)
class AttributeSource(Step):
    """``getattr`` without the user's code; see :func:`read_attribute`."""

    attribute: str

    @property
    def name(self) -> str:
        return f"{self.base.name}.{self.attribute}"

    def read(self, value: Any) -> Any:
        return read_attribute(value, self.attribute)


@dataclass(frozen=True)
class InstanceDictSource(Step):
    """An object's ``__dict__``."""

    @property
    def name(self) -> str:
        return f"{self.base.name}.__dict__"

    def read(self, value: Any) -> Any:
        return instance_dict(value)


@dataclass(frozen=True)
class ItemSource(Step):
    """An item of a list, tuple or dictionary. The key is compared as a constant if it is one, else by identity.

    >>> ItemSource(InstanceDictSource(ArgumentSource(0, "L['m']")), "scale").name
    "L['m'].scale"
    """

    key: Any = field(compare=False)
    compared_key: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compared_key", item_key(self.key))

    @property
    def name(self) -> str:
        owner = self.base
        if type(self.key) is str:
            if isinstance(owner, InstanceDictSource):
                return f"{owner.base.name}.{self.key}"
            if (
                isinstance(owner, ItemSource)
                and isinstance(owner.base, InstanceDictSource)
                and type(owner.key) is str
                and owner.key in MODULE_TABLES
            ):
                module = owner.base.base.name
                return f"{module}[{self.key}]" if self.key.isdigit() else f"{module}.{self.key}"
        if self.compared_key[0] == "object":
            return f"{owner.name}[<{type(self.key).__qualname__}>]"
        return f"{owner.name}[{self.key!r}]"

    def read(self, value: Any) -> Any:
        return read_item(value, self.key)


@dataclass(frozen=True)
class KeySource(Step):
    """The key at a position of a dictionary."""

    position: int

    @property
    def name(self) -> str:
        return f"list({self.base.name})[{self.position}]"

    def read(self, value: Any) -> Any:
        return read_key(value, self.position)


@dataclass(frozen=True)
class CellSource(Step):
    """What a closure cell of a function holds."""

    index: int

    @property
    def name(self) -> str:
        return f"{self.base.name}.__closure__[{self.index}].cell_contents"

    def cell(self, function: types.FunctionType) -> types.CellType:
        """The cell itself, full or empty."""
        return read_attribute(function, "__closure__")[self.index]

    def read(self, value: Any) -> Any:
        return self.cell(value).cell_contents


@dataclass(frozen=True)
class TypeSource(Step):
    """The type of a value."""

    @property
    def name(self) -> str:
        return f"type({self.base.name})"

    def read(self, value: Any) -> Any:
        return type(value)


@dataclass(frozen=True)
class GradSource(Step):
    """A tensor's ``.grad``."""

    @property
    def name(self) -> str:
        return f"{self.base.name}.grad"

    def read(self, value: Any) -> Any:
        return read_gradient(value)


@dataclass(frozen=True)
class NumberSource(Step):
    """A whole number as the size of an empty tensor, so that a symbolic number is an input like any other.

    Reading another value than a whole number of at least 2 raises ValueError: 0, 1 and all else have entries of their own.
    """

    @property
    def name(self) -> str:
        return f"{self.base.name}<number>"

    def read(self, value: Any) -> Any:
        if type(value) is not int or not 2 <= value < 1 << 62:
            raise ValueError(f"{value!r} is no whole number of at least 2")
        return torch.empty((value, 0))


#: Filling a tensor of float32 with more is an error in eager, also where nobody reads the tensor.
LARGEST_FLOAT: float = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class FloatSource(Step):
    """A float as a tensor without dimensions, so that a symbolic float is an input like any other.

    Reading zero (whose sign a symbol would lose), what no float32 can hold, an infinity, nan or something else raises
    ValueError: these have entries of their own.
    """

    @property
    def name(self) -> str:
        return f"{self.base.name}<number>"

    def read(self, value: Any) -> Any:
        if type(value) is not float or value == 0.0 or not abs(value) <= LARGEST_FLOAT:
            raise ValueError(f"{value!r} is no float other than zero that a float32 can hold")
        return torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True)
class SizeSource(Step):
    """A size, a stride or the storage offset of a tensor."""

    kind: str
    dim: int

    @property
    def name(self) -> str:
        shown = {"size": f"shape[{self.dim}]", "stride": f"stride({self.dim})"}
        return f"{self.base.name}.{shown.get(self.kind, 'storage_offset()')}"

    def read(self, value: Any) -> Any:
        if self.kind == "size":
            return value.size(self.dim)
        return value.stride(self.dim) if self.kind == "stride" else value.storage_offset()


@dataclass(frozen=True)
class ComputedSource(Source):
    """A number that a pure function computes from other numbers; found again by computing it again.

    ``arguments`` are plain numbers and the sources of numbers, of which there is at least one.

    >>> half = ComputedSource(math.sqrt, (ArgumentSource(0, "L['n']"),), "sqrt(n)")
    >>> half.fetch(None, (9,), {})
    3.0
    """

    function: Any
    arguments: tuple[Any, ...]
    text: str = field(compare=False)

    @property
    def name(self) -> str:
        return self.text

    @property
    def parent(self) -> Source | None:
        """The first number that it is computed from."""
        return next(item for item in self.arguments if isinstance(item, Source))

    def fetch(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        values = [item.fetch(callee, args, kwargs) if isinstance(item, Source) else item for item in self.arguments]
        try:
            return self.function(*values)
        except ArithmeticError as error:
            raise ValueError(f"{self.text} cannot be computed any more: {error}") from error


@dataclass(frozen=True)
class ReferentSource(Step):
    """What a weak reference refers to; None once that is gone."""

    @property
    def name(self) -> str:
        return f"{self.base.name}()"

    def read(self, value: Any) -> Any:
        if type(value) is not weakref.ReferenceType:
            raise TypeError("no weak reference")
        return value()
