"""Predicates: what a guard asks of a value, checked without running the user's code.

>>> Equals(0.0).holds(-0.0), Equals(1).holds(True), Length(2).holds([1, 2])
(False, False, True)
"""

from __future__ import annotations

import enum
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dovetail.guards.source import (
    Source,
    constant_key,
    instance_dict,
    item_key,
    plain_contains,
    plain_keys,
    plain_length,
    read_item,
)
from dovetail.torch_private import tensors as private_tensors

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The tables of ``nn.Module`` that hold hooks of one module."""

_HEAP_TYPE = 1 << 9


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


@dataclass(frozen=True)
class Predicate:
    """What a guard asks of the value at its source."""

    def holds(self, value: Any) -> bool:
        """Whether the value passes; runs none of the user's code."""
        raise NotImplementedError

    def describe(self, name: str) -> str:
        """What is asked, as a sentence."""
        raise NotImplementedError

    def failure(self, name: str, value: Any) -> str:
        """What is wrong with a value that did not pass."""
        raise NotImplementedError


@dataclass(frozen=True)
class TypeIs(Predicate):
    """The type is exactly this one."""

    cls: type

    def holds(self, value: Any) -> bool:
        return type(value) is self.cls

    def describe(self, name: str) -> str:
        return f"type({name}) is {self.cls.__qualname__}"

    def failure(self, name: str, value: Any) -> str:
        return f"type of `{name}` was {self.cls.__qualname__}, is {type(value).__qualname__}"


class Identity(Predicate):
    """The value is this very object: held strongly, but an instance of the user's class (or a module) weakly.

    >>> Identity(len).holds(len)
    True
    """

    __slots__ = ("address", "display", "read")

    address: int
    display: str
    read: Callable[[], Any]

    def __init__(self, value: Any) -> None:
        read: Callable[[], Any] | None = None
        kind = type(value)
        if kind.__flags__ & _HEAP_TYPE and not issubclass(kind, type):
            try:
                read = weakref.ref(value)
            except TypeError:
                pass
        object.__setattr__(self, "address", id(value))
        object.__setattr__(self, "display", short(value))
        object.__setattr__(self, "read", read if read is not None else _Holder(value))

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
        return not isinstance(self.read, _Holder)

    def holds(self, value: Any) -> bool:
        return self.read() is value and (value is not None or not self.is_weak)

    def describe(self, name: str) -> str:
        return f"{name} is the same object, {self.display}"

    def failure(self, name: str, value: Any) -> str:
        now = short(value)
        return f"`{name}` was {self.display}, is {f'another one ({now})' if now == self.display else now}"


class _Holder:
    """Gives back one object when it is called."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


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


@dataclass(frozen=True)
class Length(Predicate):
    """A container has this many items."""

    length: int

    def holds(self, value: Any) -> bool:
        return plain_length(value) == self.length

    def describe(self, name: str) -> str:
        return f"len({name}) is {self.length}"

    def failure(self, name: str, value: Any) -> str:
        return f"`len({name})` was {self.length}, is {plain_length(value)}"


@dataclass(frozen=True)
class DictKeys(Predicate):
    """A dictionary has these keys in this order; a key is compared as a constant if it is one, else by identity."""

    keys: tuple[Any, ...] = field(compare=False)
    compared_keys: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compared_keys", tuple([item_key(key) for key in self.keys]))

    def holds(self, value: Any) -> bool:
        if dict.__len__(value) != len(self.keys):
            return False
        for key, expected, compared in zip(plain_keys(value), self.keys, self.compared_keys):
            if key is not expected and item_key(key) != compared:
                return False
        return True

    def describe(self, name: str) -> str:
        return f"list({name}) is [{', '.join(map(short, self.keys))}]"

    def failure(self, name: str, value: Any) -> str:
        now = list(plain_keys(value))
        then_keys, now_keys = set(self.compared_keys), {item_key(key) for key in now}
        new = [short(key) for key in now if item_key(key) not in then_keys]
        gone = [short(key) for key, compared in zip(self.keys, self.compared_keys) if compared not in now_keys]
        changes = [f"new: {', '.join(new[:5])}"] if new else []
        changes += [f"gone: {', '.join(gone[:5])}"] if gone else []
        return f"the keys of `{name}` changed ({'; '.join(changes) or 'another order'})"


@dataclass(frozen=True)
class HasNoKey(Predicate):
    """A dictionary or set does not have this key."""

    key: Any = field(compare=False)
    compared_key: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compared_key", item_key(self.key))

    def holds(self, value: Any) -> bool:
        return not plain_contains(value, self.key)

    def describe(self, name: str) -> str:
        return f"{short(self.key)} not in {name}"

    def failure(self, name: str, value: Any) -> str:
        return f"`{name}` had no key {short(self.key)}, and has one now"


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
class Answers(Predicate):
    """What a function says of the value: ``function(value, *arguments)`` is this constant.

    For state that only the function itself can read: who was registered as a subclass, from which level on a logger writes.

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


_CLASS_DATA = frozenset({"__annotations__", "__dict__", "__doc__", "__module__", "__slots__", "__weakref__"})


@dataclass(frozen=True)
class ClassBody(Predicate):
    """A class's own dictionary has the same names in the same order, and under them the same methods and other descriptors.

    >>> class Pair:
    ...     kind = "plain"
    ...     def __len__(self): return 2
    >>> body = ClassBody.of(Pair.__dict__)
    >>> Pair.kind = "changed"
    >>> still = body.holds(Pair.__dict__)
    >>> Pair.__len__ = lambda self: 3
    >>> still, body.holds(Pair.__dict__)
    (True, False)
    """

    names: tuple[str, ...]
    methods: tuple[str, ...]
    values: tuple[Any, ...] = field(compare=False, repr=False)
    identities: tuple[int, ...]

    @staticmethod
    def of(table: Mapping[str, Any]) -> ClassBody:
        """The predicate that holds of this dictionary now."""
        methods = {
            name: value
            for name, value in table.items()
            if name not in _CLASS_DATA and (name[:2] == name[-2:] == "__" or hasattr(type(value), "__get__"))
        }
        return ClassBody(tuple(table), tuple(methods), tuple(methods.values()), tuple(map(id, methods.values())))

    def holds(self, value: Any) -> bool:
        return (*value,) == self.names and all(map(operator.is_, map(value.__getitem__, self.methods), self.values))

    def describe(self, name: str) -> str:
        return f"{name} has the same {len(self.names)} names and {len(self.methods)} methods"

    def failure(self, name: str, value: Any) -> str:
        changes = [f"new: {key}" for key in value if key not in self.names]
        changes += [f"gone: {key}" for key in self.names if key not in value]
        changes += [
            f"changed: {key}"
            for key, method in zip(self.methods, self.values, strict=True)
            if key in value and value[key] is not method
        ]
        return f"`{name}` changed ({'; '.join(changes[:5]) or 'another order'})"


@dataclass(frozen=True)
class SetEquals(Predicate):
    """A set or frozenset has exactly these items, compared as constants if they are, else by identity.

    In the same order: what goes through a set can see it, and equal sets may have different ones.
    """

    items: Iterable[Any] = field(compare=False)
    compared_items: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(self.items))
        object.__setattr__(self, "compared_items", tuple([item_key(item) for item in self.items]))

    def holds(self, value: Any) -> bool:
        if plain_length(value) != len(self.compared_items):
            return False
        walk = set.__iter__ if issubclass(type(value), set) else frozenset.__iter__
        return all(item_key(item) == key for item, key in zip(walk(value), self.compared_items, strict=True))

    def describe(self, name: str) -> str:
        return f"{name} has the same {len(self.compared_items)} items"

    def failure(self, name: str, value: Any) -> str:
        return f"the items of the set `{name}` changed"


@dataclass(frozen=True)
class NoHooks(Predicate):
    """An ``nn.Module`` has no forward or backward hooks of its own."""

    def holds(self, value: Any) -> bool:
        table = object.__getattribute__(value, "__dict__")
        return all(plain_length(read_item(table, name)) == 0 for name in HOOK_TABLES)

    def describe(self, name: str) -> str:
        return f"{name} has no hooks"

    def failure(self, name: str, value: Any) -> str:
        table = object.__getattribute__(value, "__dict__")
        found = [hooks.strip("_") for hooks in HOOK_TABLES if plain_length(read_item(table, hooks))]
        return f"`{name}` had no hooks, and has {', '.join(found)} now"


@dataclass(frozen=True)
class Unbound(Predicate):
    """A closure cell is empty. On a :class:`CellSource` the cell itself is asked, not its content."""

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


@dataclass(frozen=True)
class SameObject(Predicate):
    """The value is the same object as the one at another source; checked with both in hand."""

    other: Source

    def holds(self, value: Any) -> bool:
        raise TypeError("SameObject needs the value at the other source")

    def describe(self, name: str) -> str:
        return f"{name} is {self.other.name}"

    def failure(self, name: str, value: Any) -> str:
        return f"`{name}` and `{self.other.name}` were one object, and are two now"


@dataclass(frozen=True)
class Distinct(Predicate):
    """The value and those at other sources are objects of their own; checked with all in hand."""

    others: tuple[Source, ...]

    def holds(self, value: Any) -> bool:
        raise TypeError("Distinct needs the values at the other sources")

    def describe(self, name: str) -> str:
        return f"{name} is none of {', '.join(other.name for other in self.others)}"

    def failure(self, name: str, value: Any) -> str:
        listed = ", ".join(f"`{other.name}`" for other in self.others)
        return f"`{name}` and {listed} were different objects, and two of them are one now"


RELATIONS = (SameObject, Distinct)
"""Predicates on the objects at several sources."""


@dataclass(frozen=True)
class TensorMatch(Predicate):
    """The value is a tensor with the metadata recorded under ``index``; checked for all tensors at once in C++."""

    index: int

    def holds(self, value: Any) -> bool:
        raise TypeError("TensorMatch needs the recorded metadata")

    def describe(self, name: str) -> str:
        return f"{name} is a tensor like input {self.index}"

    def failure(self, name: str, value: Any) -> str:
        return f"the tensor `{name}` changed"


@dataclass(frozen=True)
class Leafness(Predicate):
    """Whether a tensor is a leaf of autograd's graph."""

    is_leaf: bool

    def holds(self, value: Any) -> bool:
        return bool(value.is_leaf) is self.is_leaf

    def describe(self, name: str) -> str:
        return f"{name} is {'a' if self.is_leaf else 'no'} leaf"

    def failure(self, name: str, value: Any) -> str:
        return f"`{name}.is_leaf` was {self.is_leaf}, is {not self.is_leaf}"


@dataclass(frozen=True)
class StorageOffset(Predicate):
    """A tensor starts at this element of its storage."""

    offset: int

    def holds(self, value: Any) -> bool:
        return value.storage_offset() == self.offset

    def describe(self, name: str) -> str:
        return f"{name}.storage_offset() is {self.offset}"

    def failure(self, name: str, value: Any) -> str:
        return f"`{name}.storage_offset()` was {self.offset}, is {value.storage_offset()}"


@dataclass(frozen=True)
class Elements(Predicate):
    """A small tensor of whole numbers holds these; its shape is guarded elsewhere."""

    values: tuple[int, ...]

    def holds(self, value: Any) -> bool:
        return tuple(value.flatten().tolist()) == self.values

    def describe(self, name: str) -> str:
        return f"{name} holds {short(self.values)}"

    def failure(self, name: str, value: Any) -> str:
        return f"`{name}` held {short(self.values)}, holds {short(tuple(value.flatten().tolist()))}"


@dataclass(frozen=True)
class SameElements(Predicate):
    """A small tensor holds these values, to the last bit; its shape and dtype are guarded elsewhere."""

    content: bytes

    @staticmethod
    def _bytes(value: torch.Tensor) -> bytes:
        return bytes(value.detach().flatten().contiguous().view(torch.uint8).tolist())

    @staticmethod
    def of(value: torch.Tensor) -> SameElements:
        """The predicate that this tensor's values of now fulfil."""
        return SameElements(SameElements._bytes(value))

    def holds(self, value: Any) -> bool:
        return self._bytes(value) == self.content

    def describe(self, name: str) -> str:
        return f"{name} holds the same values"

    def failure(self, name: str, value: Any) -> str:
        return f"the values of `{name}` have changed"


@dataclass(frozen=True)
class TensorFacts:
    """The metadata of one tensor at capture, without the tensor. A size or stride of None is symbolic: any will do."""

    type: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    requires_grad: bool
    is_leaf: bool
    dispatch_keys: str

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is as it was."""
        try:
            now = TensorFacts.of(tensor)
        except RuntimeError:
            # A view that autograd refuses to record, because its base was written to in a way that it forbids.
            return False
        return replace(self, shape=now.shape, stride=now.stride) == now and all(
            then is None or then == value
            for then, value in zip((*self.shape, *self.stride), (*now.shape, *now.stride), strict=True)
        )

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorFacts:
        """Read the metadata of a dense tensor."""
        return TensorFacts(
            type(tensor),
            tensor.dtype,
            tensor.device,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.requires_grad,
            tensor.is_leaf,
            private_tensors.dispatch_keys(tensor),
        )

    def differences(self, name: str, value: Any) -> list[str]:
        """Sentences on what is another way now; leafness has a guard of its own."""
        kind = type(value)
        if kind is not self.type:
            return [f"type of `{name}` was {self.type.__qualname__}, is {kind.__qualname__}"]
        if value.layout is not torch.strided:
            return [f"`{name}.layout` was torch.strided, is {value.layout}"]
        found = []
        for attribute in ("dtype", "device", "requires_grad"):
            then, now = getattr(self, attribute), getattr(value, attribute)
            if then != now:
                found.append(f"`{name}.{attribute}` was {then}, is {now}")
        shape, stride = tuple(value.shape), tuple(value.stride())
        if len(shape) != len(self.shape):
            found.append(f"`{name}.dim()` was {len(self.shape)}, is {len(shape)}")
        else:
            sizes = zip(self.shape, shape)
            found += [
                f"`{name}.shape[{i}]` was {then}, is {now}"
                for i, (then, now) in enumerate(sizes)
                if then not in (None, now)
            ]
            steps = zip(self.stride, stride)
            if not found and any(then not in (None, now) for then, now in steps):
                found.append(f"`{name}.stride()` was {self.stride}, is {stride}")
        if not found and private_tensors.dispatch_keys(value) != self.dispatch_keys:
            found.append(
                f"the dispatch keys of `{name}` were {self.dispatch_keys}, are {private_tensors.dispatch_keys(value)}"
            )
        return found
