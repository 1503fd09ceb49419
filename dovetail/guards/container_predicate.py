"""Predicates on containers: lists, dictionaries, sets, tables of hooks, the dictionaries of classes."""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.guards.predicate import Predicate
from dovetail.guards.reading import Key, plain_contains, plain_keys, plain_length, read_item
from dovetail.guards.source import Source

if TYPE_CHECKING:
    from dovetail.guards.writer import Writer

#: The tables of ``nn.Module`` that hold hooks of one module.
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CALL_IMPL = "_call_impl"  # the method of a module that runs its hooks and its forward

_SIZED_TYPES = frozenset({list, tuple, dict, set, frozenset, str, bytes, range, collections.OrderedDict})
_CLASS_DATA = frozenset({"__annotations__", "__dict__", "__doc__", "__module__", "__slots__", "__weakref__"})


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

    def condition(self, writer: Writer, source: Source, variable: str) -> str:
        if writer.tree.known_type(source) in _SIZED_TYPES:
            return f"len({variable}) == {self.length}"
        return super().condition(writer, source, variable)


@dataclass(frozen=True, init=False)
class DictKeys(Predicate):
    """A dictionary has these keys in this order; see :class:`Key` for how they are compared."""

    keys: tuple[Key, ...]

    def __init__(self, keys: Iterable[Any]) -> None:
        object.__setattr__(self, "keys", tuple(map(Key, keys)))

    def holds(self, value: Any) -> bool:
        if dict.__len__(value) != len(self.keys):
            return False
        return all(expected.matches(key) for key, expected in zip(plain_keys(value), self.keys))

    def describe(self, name: str) -> str:
        return f"list({name}) is [{', '.join(map(str, self.keys))}]"

    def failure(self, name: str, value: Any) -> str:
        now = list(map(Key, plain_keys(value)))
        new = [str(key) for key in now if key not in self.keys]
        gone = [str(key) for key in self.keys if key not in now]
        changes = [f"new: {', '.join(new[:5])}"] if new else []
        changes += [f"gone: {', '.join(gone[:5])}"] if gone else []
        return f"the keys of `{name}` changed ({'; '.join(changes) or 'another order'})"

    def condition(self, writer: Writer, source: Source, variable: str) -> str:
        if writer.tree.known_type(source) is dict:
            if not self.keys:
                return f"not {variable}"
            keys = tuple([key.read() for key in self.keys])
            if {*map(type, keys)} == {str}:
                types = f"{{*map(type, {variable})}} == {writer.constant({str}, 'strings_')}"
                return f"(*{variable},) == {writer.constant(keys, 'keys_')} and {types}"
        return super().condition(writer, source, variable)


@dataclass(frozen=True, init=False)
class HasNoKey(Predicate):
    """A dictionary or set does not have this key; of a key that the program has let go, this is sure."""

    held: Key

    def __init__(self, key: Any) -> None:
        object.__setattr__(self, "held", Key(key))

    @property
    def key(self) -> Any:
        """The key; KeyError if the program has let it go."""
        return self.held.value

    def holds(self, value: Any) -> bool:
        key = self.held.read()
        return (key is None and self.held.is_weak) or not plain_contains(value, key)

    def describe(self, name: str) -> str:
        return f"{self.held} not in {name}"

    def failure(self, name: str, value: Any) -> str:
        return f"`{name}` had no key {self.held}, and has one now"

    def condition(self, writer: Writer, source: Source, variable: str) -> str:
        tree = writer.tree
        is_plain = tree.known_type(source) in (dict, set, frozenset) or tree.is_object_dict(source)
        if not self.held.is_weak and (is_plain or tree.class_of_table(source) is not None):
            return f"{writer.literal(self.key)} not in {variable}"
        return super().condition(writer, source, variable)


@dataclass(frozen=True, init=False)
class SetEquals(Predicate):
    """A set or frozenset has exactly these items, in the same order: a loop over the set can see it, and equal sets may differ."""

    items: tuple[Key, ...]

    def __init__(self, items: Iterable[Any]) -> None:
        object.__setattr__(self, "items", tuple(map(Key, items)))

    def holds(self, value: Any) -> bool:
        if plain_length(value) != len(self.items):
            return False
        walk = set.__iter__ if issubclass(type(value), set) else frozenset.__iter__
        return all(expected.matches(item) for item, expected in zip(walk(value), self.items, strict=True))

    def describe(self, name: str) -> str:
        return f"{name} has the same {len(self.items)} items"

    def failure(self, name: str, value: Any) -> str:
        return f"the items of the set `{name}` changed"


@dataclass(frozen=True)
class NoHooks(Predicate):
    """The ``__dict__`` of an ``nn.Module`` has no hooks in it, and no ``_call_impl`` in the place of its class's."""

    def holds(self, value: Any) -> bool:
        has_none = all(plain_length(read_item(value, name)) == 0 for name in HOOK_TABLES)
        return has_none and not plain_contains(value, CALL_IMPL)

    def describe(self, name: str) -> str:
        return f"{name.removesuffix('.__dict__')} has no hooks"

    def failure(self, name: str, value: Any) -> str:
        found = [hooks.strip("_") for hooks in HOOK_TABLES if plain_length(read_item(value, hooks))] or [CALL_IMPL]
        return f"`{name.removesuffix('.__dict__')}` had no hooks, and has {', '.join(found)} now"

    def condition(self, writer: Writer, source: Source, variable: str) -> str:
        if writer.tree.is_object_dict(source):
            conditions = [f"not {variable}[{name!r}]" for name in HOOK_TABLES]
            return " and ".join([*conditions, f"{CALL_IMPL!r} not in {variable}"])
        return super().condition(writer, source, variable)


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

    #: As they were, and as they are once ``copy`` or ``pickle`` has seen an object of the class.
    names: tuple[tuple[str, ...], tuple[str, ...]]
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
        names, values = ((*table,), (*table, "__slotnames__")), tuple(methods.values())
        return ClassBody(names, tuple(methods), values, tuple(map(id, values)))

    def holds(self, value: Any) -> bool:
        return (*value,) in self.names and all(map(operator.is_, map(value.__getitem__, self.methods), self.values))

    def describe(self, name: str) -> str:
        return f"{name} has the same {len(self.names[0])} names and {len(self.methods)} methods"

    def failure(self, name: str, value: Any) -> str:
        changes = [f"new: {key}" for key in value if key not in self.names[1]]
        changes += [f"gone: {key}" for key in self.names[0] if key not in value]
        pairs = zip(self.methods, self.values, strict=True)
        changes += [f"changed: {key}" for key, method in pairs if key in value and value[key] is not method]
        return f"`{name}` changed ({'; '.join(changes[:5]) or 'another order'})"

    def condition(self, writer: Writer, source: Source, variable: str) -> str:
        if len(self.methods) < 2:
            return super().condition(writer, source, variable)
        take = writer.constant(operator.itemgetter(*self.methods), "take_")
        values, is_object = writer.constant(self.values, "methods_"), writer.constant(operator.is_, "is_object_")
        same_names = f"(*{variable},) in {writer.constant(self.names, 'names_')}"
        return f"{same_names} and all(map({is_object}, {take}({variable}), {values}))"
