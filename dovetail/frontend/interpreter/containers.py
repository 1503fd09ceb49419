"""Containers: items, iteration, membership, and the methods of lists, dictionaries and sets."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import itertools
import operator
import types
from collections import deque
from collections.abc import Iterable, Iterator, MappingView
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.call_tables import LOOKUPS, SEARCHES, WRITERS, check_loading
from dovetail.frontend.interpreter.callbacks import callback_codes, watched
from dovetail.frontend.interpreter.generator import InterpretedGenerator
from dovetail.frontend.interpreter.lookup import class_attribute, python_method
from dovetail.frontend.interpreter.user_code import is_user_function
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import STAND_INS, operator_rule
from dovetail.frontend.values.aliases import guard_equality, guard_key
from dovetail.frontend.values.leaves import is_leaf_value, plain_numbers
from dovetail.guards import AttributeSource, HasNoKey, Length
from dovetail.guards.reading import plain_keys, plain_length, read_item

CONTAINERS = (list, tuple, dict, set, frozenset, deque)


# Answers of these about a key are guarded (see :mod:`dovetail.frontend.values.aliases`).
HASHING = frozenset({"__hash__", "__eq__"})
_COMPARISONS = frozenset({"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"})
_TAKE_INDEX = ("insert", "pop", "__getitem__", "__setitem__", "__delitem__")


class Containers(TracingInterpreter):
    """The part of the interpreter that reads and writes items, goes through containers, searches them, and calls their methods."""

    # --- items --------------------------------------------------------------------------------------------------------

    def load_item(self, target: Any, key: Any) -> Any:
        if isinstance(target, torch.Tensor):
            return self.call_torch(operator.getitem, (target, key), {})
        if isinstance(method := class_attribute(type(target), "__getitem__")[0], types.FunctionType):
            return self.call(types.MethodType(method, target), (key,), {})
        if isinstance(target, dict):
            return self._load_dict_item(target, self.as_key(key, target))
        if isinstance(target, (list, tuple)) or type(target) is deque:
            found = self.derive(operator.getitem, (target, key))
            return self._load_list_item(target, self.as_index(plain_numbers(key))) if found is NotImplemented else found
        if isinstance(target, type):
            made: Any = getattr(getattr(target, "__class_getitem__", None), "__func__", None)
            is_own = type(made) is types.FunctionType and is_user_function(made)
            return self.call(types.MethodType(made, target), (key,), {}) if is_own else target[key]  # type: ignore[index]
        return self.operate(operator.getitem, target, key)

    def _load_dict_item(self, target: dict[Any, Any], key: Any) -> Any:
        if dict.__contains__(target, key):
            return self.values.read(dict.__getitem__(target, key), self.values.item_source(target, key))
        kind = type(target)
        missing, _ = class_attribute(kind, "__missing__")
        self.guard_missing_key(target, key)
        if isinstance(missing, types.FunctionType):
            return self.call(types.MethodType(missing, target), (key,), {})
        factory = target.default_factory if isinstance(target, collections.defaultdict) else None
        if kind is collections.defaultdict and factory is not None:
            if (source := self.values.source_of(target)) is not None:
                factory = self.values.read(factory, AttributeSource(source, "default_factory"))
            value = self.call(factory, (), {})
            self.effects.set_item(target, key, value)
            return value
        if kind is not dict and hasattr(kind, "__missing__"):
            raise Break(f"a missing key of a {kind.__name__} is looked up")
        raise KeyError(key)

    def _load_list_item(self, target: Any, key: Any) -> Any:
        if isinstance(key, torch.Tensor):
            raise Break("a tensor is used as an index into a Python list", "use a Python number")
        if not hasattr(type(key), "__index__"):  # a slice, or what Python refuses
            self.values.whole(target)
            return self.values.wrap(operator.getitem(target, key))
        position, length = operator.index(key), plain_length(target)
        if position < 0 or position >= length:
            # That there is no such item is an assumption too: a loop over the items of a list ends so.
            self.guard_length(target)
        position += length if position < 0 else 0
        return self.values.read(read_item(target, key), self.values.item_source(target, position))

    def store_item(self, target: Any, key: Any, value: Any) -> None:
        if isinstance(target, torch.Tensor):
            self.call_torch(operator.setitem, (target, key, value), {})
            return
        if isinstance(method := class_attribute(type(target), "__setitem__")[0], types.FunctionType):
            self.call(types.MethodType(method, target), (key, value), {})
            return
        for handler in operator_rule.get(operator.setitem, ()):
            if handler(self, operator.setitem, (target, key, value)) is not NotImplemented:
                return
        if isinstance(target, (list, dict)):
            key = self.as_key(key, target)
            if isinstance(target, list):
                # The item that stood at this place does not matter: a counter in a list may be another number at each call.
                self.values.whole(target, but=key if type(key) is int and -len(target) <= key < len(target) else None)
                if isinstance(key, slice):
                    value = self.drain(value)
            self.effects.set_item(target, key, value)
        else:
            raise Break(f"an item of a {type(target).__name__} is set")

    def delete_item(self, target: Any, key: Any) -> None:
        if isinstance(method := class_attribute(type(target), "__delitem__")[0], types.FunctionType):
            self.call(types.MethodType(method, target), (key,), {})
        elif isinstance(target, (list, dict)):
            self.values.whole(target)
            self.effects.delete_item(target, self.as_key(key, target))
        else:
            raise Break(f"an item of a {type(target).__name__} is deleted")

    def as_key(self, value: Any, table: Any = None) -> Any:
        """A value that is to be hashed, as a ``table`` has it: symbolic numbers are plain ones there."""
        guard_key(self.values, value, table is not None and self.values.source_of(table) is not None)
        return plain_numbers(value) if table is None else self.values.key_in(table, value)

    def guard_missing_key(self, owner: Any, key: Any) -> None:
        source = self.values.source_of(owner)
        if source is not None and not self.effects.written(owner, key):
            self.values.guard(source, HasNoKey(key), f"{source.name} has no key {key!r}")

    def guard_length(self, value: Any) -> None:
        if (source := self.values.source_of(value)) is None:
            return
        if not self.effects.written(value):
            if not isinstance(value, (*CONTAINERS, str, bytes, range)):
                raise Break(
                    f"the length of a {type(value).__qualname__} object is asked for, which nobody guards",
                    "ask for it outside of the function, or keep the items in a list or dictionary",
                )
            self.values.guard(source, Length(plain_length(value)), f"the length of {source.name} was read")
        elif isinstance(value, dict):
            # How many there are after a write depends on which there were.
            self.values.guard_keys(value)

    # --- iteration ----------------------------------------------------------------------------------------------------

    def iterate(self, value: Any) -> Any:
        if isinstance(value, (InterpretedGenerator, range, str)):
            return iter(value)
        if isinstance(value, torch.Tensor):
            return iter(value.unbind(0)) if value.dim() else iter(value)
        kind = type(value)
        method, _ = class_attribute(kind, "__iter__")
        is_python = isinstance(method, types.FunctionType)
        if is_python and (is_user_function(method) or kind in STAND_INS):
            return self.call(types.MethodType(method, value), (), {})
        check_loading(kind.__module__)
        is_old = self.values.source_of(value) is not None
        if isinstance(value, CONTAINERS):
            for handler in operator_rule.get(iter, ()):
                if (items := handler(self, iter, (value,))) is not NotImplemented:
                    return items
            guard: Any = self.values.guard_keys if isinstance(value, dict) else self.values.whole
            guard(value)
        elif isinstance(value, Iterator) and is_old:
            raise Break("an iterator that existed before the call is advanced", "hand over a list instead")
        elif method is None or not hasattr(kind, "__iter__"):
            getter, _ = class_attribute(kind, "__getitem__")
            if isinstance(getter, types.FunctionType):
                return self._iterate_by_item(value)
        elif is_old and not is_python and not isinstance(value, type) and not is_leaf_value(value):
            raise Break(
                f"a {kind.__name__} that existed before the call is gone through, and nobody guards what is in it",
                "hand over a list of its items",
            )
        return iter(value)

    def _iterate_by_item(self, value: Any) -> Iterator[Any]:
        with contextlib.suppress(IndexError):
            for position in itertools.count():
                yield self.load_item(value, position)

    def advance(self, iterator: Any) -> tuple[bool, Any]:
        method = python_method(iterator, "__next__")
        check_loading(type(iterator).__module__)
        try:
            if method is not None and not isinstance(iterator, collections.abc.Generator):
                return False, self.call(types.MethodType(method, iterator), (), {})
            if self.values.source_of(iterator) is not None:
                raise Break("an iterator that existed before is advanced", "hand over a list instead", is_clean=True)
            self.effects.moves += 1
            return False, self.values.wrap(next(iterator))
        except StopIteration as stop:
            return True, stop.value

    def send(self, iterator: Any, value: Any) -> tuple[bool, Any]:
        try:
            if value is None:
                return self.advance(iterator)
            return False, self.call(self.load_attribute(iterator, "send"), (value,), {})
        except StopIteration as stop:
            return True, stop.value

    def drain(self, value: Any, is_hinted: bool = False) -> list[Any]:
        """All items of an iterable; ``is_hinted``: Python asks for their number first, as for a list made of them."""
        iterator = self.iterate(value)
        if is_hinted and (method := python_method(value, "__len__")) is not None:
            with contextlib.suppress(TypeError):
                self.called_length(method, value)
        items: list[Any] = []
        while True:
            done, item = self.advance(iterator)
            if done:
                return items
            items.append(item)

    def items_of(self, mapping: Any) -> dict[Any, Any]:
        """A mapping as a plain dictionary of traced values."""
        if isinstance(mapping, dict) and not _asks_for_keys(mapping):
            self.values.guard_keys(mapping)
            return {key: self._load_dict_item(mapping, key) for key in plain_keys(mapping)}
        keys = self.drain(self.call(self.load_attribute(mapping, "keys"), (), {}))
        return {key: self.load_item(mapping, key) for key in keys}

    def change(self, container: Any, method: str, *args: Any) -> None:
        """Call a method of a list, dictionary or set that an instruction builds; after a graph break it existed before."""
        function = getattr(container, method)
        if self.values.source_of(container) is None:
            function(*args)
        else:
            self.call_container_method(container, function, args, {})

    # --- searching ----------------------------------------------------------------------------------------------------

    def ask(self, method: types.FunctionType, item: Any, *others: Any) -> Any:
        """Call a special method of an object."""
        return self.call(types.MethodType(method, item), others, {})

    def equal(self, left: Any, right: Any) -> bool:
        """Whether two objects are one, or equal."""
        return left is right or self.truth(self.operate(operator.eq, left, right))

    def equal_containers(self, left: Any, right: Any) -> bool | None:
        """Whether two containers hold the same, item by item; None where no item has a say of its own."""
        kind = type(left)
        if kind is not type(right) or kind not in (list, tuple, dict):
            return None
        mine, other = (list(item.values()) if kind is dict else list(item) for item in (left, right))
        if all(is_leaf_value(item) for item in (*mine, *other)):
            return None
        if len(mine) != len(other) or (kind is dict and left.keys() != right.keys()):
            return False
        other = [right[key] for key in left] if kind is dict else other
        wrap = self.values.wrap
        return all(self.equal(wrap(a), wrap(b)) for a, b in zip(mine, other, strict=True))

    def contains(self, container: Any, item: Any) -> bool:
        """``item in container``."""
        if (method := python_method(container, "__contains__")) is not None:
            return self.truth(self.ask(method, container, item))
        if isinstance(container, (dict, set, frozenset)):
            return self._is_key(container, item)
        if isinstance(container, (list, tuple)):
            return bool(self.search(container, "__contains__", (item,)))
        kind = type(container)
        found, _ = class_attribute(kind, "__contains__")
        is_iterable = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
        if not is_iterable or (found is not None and hasattr(kind, "__contains__")):
            return bool(self.native(operator.contains, (container, item), {}))
        # The search ends at the first item that fits.
        iterator = self.iterate(container)
        while True:
            done, entry = self.advance(iterator)
            if done or self.equal(entry, item):
                return not done

    def _is_key(self, container: Any, item: Any) -> bool:
        """``item in`` a dictionary or set."""
        if isinstance(container, dict):
            return bool(self.call_container_method(container, container.__contains__, (item,), {}))
        item = self.as_key(item, container)
        self.values.whole(container)
        if self.values.source_of(container) is None or isinstance(item, torch.Tensor):
            # A tensor's hash is its identity: no two are ever compared.
            return item in container
        if not is_leaf_value(item):
            for entry in container:
                if entry is item or self.values.wrap(entry) is item:
                    return True
                if isinstance(entry, torch.Tensor):
                    raise Break("a container of tensors is searched", "compare with `is` in a loop")
            return item in container
        base: Any = set if isinstance(container, set) else frozenset
        return bool(base.__contains__(container, item))

    def search(self, container: Any, name: str, args: tuple[Any, ...]) -> Any:
        item, *bounds = (plain_numbers(given) for given in args)
        guard_equality(self.values, item)
        self.values.whole(container)
        kind: Any = list if isinstance(container, list) else tuple
        entries = [self.values.wrap(entry) for entry in kind.__iter__(container)]
        places = range(len(entries))
        if name == "count":
            return sum(self._first(entries, item, (place,)) is not None for place in places)
        place = self._first(entries, item, places[slice(*(*bounds, None, None)[:2])])
        if name == "__contains__":
            return place is not None
        if place is None:
            if kind is list and name == "index":
                raise ValueError(f"{item!r} is not in list")
            raise ValueError(f"{kind.__name__}.{name}(x): x not in {kind.__name__}")
        if name == "remove":
            self.effects.delete_item(container, place)
        return place if name == "index" else None

    def _first(self, entries: list[Any], item: Any, places: Iterable[int]) -> int | None:
        """The first of these places whose entry is the item, or equal to it."""
        is_leaf = is_leaf_value(item)
        for place in places:
            entry = entries[place]
            if entry is item:
                return place
            if isinstance(entry, torch.Tensor) or isinstance(item, torch.Tensor):
                raise Break("a container of tensors is searched", "compare with `is` in a loop")
            if entry == item if is_leaf and is_leaf_value(entry) else self.equal(entry, item):
                return place
        return None

    # --- methods ------------------------------------------------------------------------------------------------------

    def call_container_method(self, owner: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function.__name__
        count = 0 if kwargs else len(args)
        if isinstance(owner, list) and 0 < count <= SEARCHES.get(name, 0):
            return self.search(owner, name, args)
        args = self._with_keys(owner, name, args)
        if isinstance(owner, dict) and 0 < count <= LOOKUPS.get(name, 0):
            return self._look_up(owner, name, args)
        if name == "__setitem__" and isinstance(owner, (list, dict)) and count == 2:
            if isinstance(owner, list):
                self.values.whole(owner)
            self.effects.set_item(owner, *args)
            return None
        is_end = type(owner) in (list, deque) and count == 1 and name in ("append", "extend", "__iadd__")
        if is_end and (name == "append" or type(args[0]) in (list, tuple)):
            for item in args if name == "append" else self.drain(args[0]):
                self.effects.append(owner, item)
            return owner if name == "__iadd__" else None
        if name == "pop" and isinstance(owner, set) and self.values.source_of(owner) is not None:
            raise Break("set.pop takes whichever item comes first in memory", "take a certain item")
        self.values.whole(owner)
        writes = name in WRITERS
        if writes:
            self.effects.touch_all(owner)
            if isinstance(owner, (list, deque)):
                self.values.put_back(owner)
        arguments = tuple(self._container_argument(owner, at, item) for at, item in enumerate(args))
        keywords = {at: (self.called_argument if at == "key" else self.native_argument)(kwargs[at]) for at in kwargs}
        held = (owner,) if isinstance(owner, list) or name[:2] == "__" else ()
        without = frozenset() if name in _COMPARISONS else HASHING
        with watched(function, callback_codes((*held, *arguments, *keywords.values()), without)):
            result = function(*arguments, **keywords)
        if writes and not isinstance(owner, set):
            self.values.put_back(owner, has_all=False)
        if writes and isinstance(owner, dict):
            self.effects.touch_all(owner)
        return self.values.wrap(result)

    def _with_keys(self, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with those that are hashed or count places as the container has them."""
        if isinstance(owner, set):
            return tuple(self.as_key(item, owner) for item in args)
        if isinstance(owner, dict) and args and name != "update":
            return (self.as_key(args[0], owner), *args[1:])
        if isinstance(owner, list) and args and name in _TAKE_INDEX:
            return (plain_numbers(args[0]), *args[1:])
        return args

    def _container_argument(self, owner: Any, at: int, item: Any) -> Any:
        if isinstance(item, (Iterator, MappingView)) and self.values.source_of(item) is not None:
            raise Break(
                "an iterator or a view that existed before the call is gone through", "hand over a list instead"
            )
        if not isinstance(owner, (dict, set)):
            return self.native_argument(item)
        # A tensor is a key there, and the container has the real ones.
        if isinstance(item, torch.Tensor) and at == 0:
            return item
        self.values.check_merged(item)
        return self.native_argument(item)

    def _look_up(self, owner: Any, name: str, args: tuple[Any, ...]) -> Any:
        key = args[0]
        if name == "__getitem__":
            return self._load_dict_item(owner, key)
        if dict.__contains__(owner, key):
            value = self.values.read(dict.__getitem__(owner, key), self.values.item_source(owner, key))
            return True if name == "__contains__" else value
        self.guard_missing_key(owner, key)
        return False if name == "__contains__" else args[1] if len(args) > 1 else None


def _asks_for_keys(mapping: dict[Any, Any]) -> bool:
    """Whether Python copies a dictionary by its ``keys()`` and ``[]``; one that is gone through as any other it takes whole."""
    if python_method(mapping, "__iter__") is not None:
        return True
    methods = (python_method(mapping, "keys"), python_method(mapping, "__getitem__"))
    return isinstance(mapping, collections.OrderedDict) and any(method is not None for method in methods)
