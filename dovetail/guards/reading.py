"""Reading Python objects without running any of the program's code: no ``__getattr__``, ``__getitem__``, ``__eq__`` or property.

Guards look at live objects of the program at every call. A check that ran the program's code could change what it checks, call
itself, or raise; so everything here goes straight to the functions of the built-in types. Where a value can only be had by running
the program's code, reading raises one of :data:`FETCH_ERRORS`, which a check takes as a miss.
"""

from __future__ import annotations

import collections
import enum
import math
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dovetail.torch_private.calls import no_torch_function

#: The errors that reading a value may raise.
FETCH_ERRORS: tuple[type[Exception], ...] = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError)

_MISSING: Any = object()
_HEAP_TYPE = 1 << 9
# Descriptors made in C, whose __get__ runs nobody's Python code.
_DATA_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_METHOD_DESCRIPTORS = (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# Types of class attributes that reading them on the class gives unchanged.
_RETURN_THEMSELVES = frozenset({*_METHOD_DESCRIPTORS, *_DATA_DESCRIPTORS, property})
_tuple_getter = type(collections.namedtuple("_Pair", "a b").a)  # type: ignore[attr-defined]
#: The class and its bases in the order in which they are searched, whatever its metaclass says; one tuple until it changes.
class_order: Any = type.__dict__["__mro__"].__get__
#: A live view on the class's own dictionary, whatever its metaclass says.
class_dict: Any = type.__dict__["__dict__"].__get__
_PLAIN_KEYS = frozenset({bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented)})
#: Their attributes run nobody's ``__torch_function__``.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_TORCH_KEYS = frozenset({torch.dtype, torch.device, torch.memory_format, torch.layout})


# --- constants --------------------------------------------------------------------------------------------------------


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
    """A hashable form of a dictionary's key: by value for a constant, else by identity."""
    try:
        return constant_key(key)
    except TypeError:
        return "object", id(key)


# --- references to objects of the program -----------------------------------------------------------------------------


class Holder:
    """Holds an object strongly; called like a weak reference."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


def _is_passing(value: Any) -> bool:
    """Whether the program may let go of an object, and of much memory with it: an instance of a class made in Python (a module,
    a tensor, an optimizer), or a closure that no module holds under its name.
    """
    if type(value) is not types.FunctionType:
        return is_mutable_type(type(value))
    if not value.__closure__ or "<locals>" not in value.__qualname__:
        return False
    module = sys.modules.get(value.__module__) if type(value.__module__) is str else None
    return getattr(module, "__dict__", {}).get(value.__name__) is not value


def reference(value: Any) -> Callable[[], Any]:
    """A reference that is called to get the object: weak where the program may let go of the object, else strong.

    >>> module = torch.nn.ReLU()
    >>> weak, strong = reference(module), reference(3)
    >>> del module
    >>> weak(), strong()
    (None, 3)
    """
    if _is_passing(value):
        try:
            return weakref.ref(value)
        except TypeError:
            return Holder(value)
    return Holder(value)


class Key:
    """A key of a dictionary or an item of a set, as a guard remembers it: a constant by value, another object by identity.

    >>> Key(1).matches(1), Key(1).matches(True), Key(1) == Key(1)
    (True, False, True)
    """

    __slots__ = ("compared", "display", "read")

    def __init__(self, key: Any) -> None:
        self.compared = item_key(key)
        self.read = reference(key) if self.is_object else Holder(key)
        self.display = short(key)

    @property
    def is_object(self) -> bool:
        """Whether it is compared by identity."""
        return self.compared[0] == "object"

    @property
    def is_weak(self) -> bool:
        """Whether the object may be gone."""
        return type(self.read) is not Holder

    @property
    def value(self) -> Any:
        """The key itself; KeyError if the program has let it go."""
        found = self.read()
        if found is None and self.is_weak:
            raise KeyError(self.display)
        return found

    def matches(self, key: object) -> bool:
        """Whether a key is this one."""
        if self.is_object:
            return key is not None and self.read() is key
        return self.read() is key or item_key(key) == self.compared

    def __eq__(self, other: object) -> bool:
        return type(other) is Key and self.compared == other.compared

    def __hash__(self) -> int:
        return hash(self.compared)

    def __repr__(self) -> str:
        return self.display


def short(value: object) -> str:
    """A value as a sentence shows it, without running the user's ``__repr__``."""
    try:
        constant_key(value)
    except TypeError:
        if isinstance(value, type):
            return f"the class {value.__qualname__}"
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            return f"the function {value.__qualname__}"
        if isinstance(value, types.ModuleType):
            return f"the module {value.__name__}"
        return f"a {type(value).__qualname__} object"
    if isinstance(value, enum.Enum):
        text = f"{type(value).__qualname__}.{instance_dict(value).get('_name_', '?')}"
    else:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- containers -------------------------------------------------------------------------------------------------------


_KEYED = (dict, set, frozenset, types.MappingProxyType)
_ITERATED = (list, tuple, set, frozenset, collections.deque)
_SIZED = (*_ITERATED, dict, str, bytes, range)
_INDEXED = (dict, list, tuple, collections.deque, types.MappingProxyType)


def _builtin(value: Any, among: tuple[Any, ...]) -> Any:
    """The builtin class of a container, whose methods run none of the code of a class that derives from it."""
    kind = type(value)
    for builtin in among:
        if issubclass(kind, builtin):
            return builtin
    raise TypeError(f"a {kind.__qualname__} is no plain container")


def plain_length(value: Any) -> int:
    """``len`` of a built-in container, also of a subclass, without running the user's ``__len__``."""
    return _builtin(value, _SIZED).__len__(value)  # type: ignore[no-any-return]


def plain_items(value: Any) -> list[Any]:
    """The items of a list, tuple, deque or set, also of a subclass, without running the user's ``__iter__``."""
    return [*_builtin(value, _ITERATED).__iter__(value)]


def are_constants(value: Any, expected: Sequence[Any]) -> bool:
    """Whether the items of a list, tuple or deque are these constants.

    >>> are_constants([1, 0.0], (1, 0.0)), are_constants([True, -0.0], (1, 0.0))
    (True, False)
    """
    items = plain_items(value)
    return len(items) == len(expected) and all(
        one is other or constant_key(one) == constant_key(other) for one, other in zip(items, expected, strict=True)
    )


def plain_keys(value: Any) -> Iterator[Any]:
    """The keys of a dictionary in its own order, without running the user's code."""
    kind = type(value)
    if issubclass(kind, collections.OrderedDict):
        # After move_to_end the order of an OrderedDict is no longer that of the dictionary below it.
        return collections.OrderedDict.__iter__(value)
    return dict.__iter__(value)


def plain_contains(container: Any, key: object) -> bool:
    """Whether a dictionary or set has the key, without running the user's ``__contains__``."""
    return _builtin(container, _KEYED).__contains__(container, key)  # type: ignore[no-any-return]


def read_entry(container: dict[Any, Any], key: Any) -> Any:
    """The value that a dictionary holds under a key; no ``__missing__`` runs: that of a ``defaultdict`` would add the key.

    >>> table = collections.defaultdict(list)
    >>> read_entry(table, "k")
    Traceback (most recent call last):
        ...
    KeyError: 'k'
    >>> len(table)
    0
    """
    value = dict.get(container, key, _MISSING)
    if value is _MISSING:
        raise KeyError(key)
    return value


def read_item(container: Any, key: Any) -> Any:
    """One item of a list, tuple, deque or dictionary, also of a subclass, without running the user's ``__getitem__``."""
    builtin = _builtin(container, _INDEXED)
    return read_entry(container, key) if builtin is dict else builtin.__getitem__(container, key)


# --- attributes -------------------------------------------------------------------------------------------------------


def _in_class(kind: type, name: str) -> Any:
    for owner in class_order(kind):
        found = class_dict(owner).get(name, _MISSING)
        if found is not _MISSING:
            return found
    return _MISSING


def instance_dict(value: object) -> Any:
    """The ``__dict__`` of an object or class; AttributeError if it has none."""
    return object.__getattribute__(value, "__dict__") if not issubclass(type(value), type) else class_dict(value)


def is_heap_type(kind: type) -> bool:
    """Whether a class was made at run time: every class made in Python is."""
    return bool(kind.__flags__ & _HEAP_TYPE)


def is_mutable_type(kind: type) -> bool:
    """Whether objects of this type may be given another type: the type was made in Python, and its objects are no classes."""
    return is_heap_type(kind) and not issubclass(kind, type)


def metaclasses(owner: type) -> list[type]:
    """The classes where an attribute of a class may be found first: its metaclass, and bases of that, if it is not ``type``."""
    return [kind for kind in class_order(type(owner)) if kind not in (type, object)]


def overrides_dict(kind: type) -> bool:
    """Whether a class or one of its bases has a ``__dict__`` of the program's making, such as a property."""
    found = (class_dict(owner).get("__dict__") for owner in class_order(kind))
    return any(item is not None and type(item) is not types.GetSetDescriptorType for item in found)


def is_plain_instance(kind: type) -> bool:
    """Whether ``value.__dict__`` of an instance runs none of the program's code."""
    own: Any = kind.__getattribute__
    return own is object.__getattribute__ and not overrides_dict(kind)


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
        if kind not in _PLAIN_TENSORS and issubclass(kind, torch.Tensor):
            with no_torch_function():
                return found.__get__(value, kind)
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
    if type(tensor) not in _PLAIN_TENSORS:
        with no_torch_function():
            return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
