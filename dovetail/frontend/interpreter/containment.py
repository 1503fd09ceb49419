"""``in``, and the equality of containers: item by item, with the items' own methods interpreted."""

from __future__ import annotations

import operator
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.class_lookup import class_attribute, python_method
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.aliases import guard_equality
from dovetail.frontend.values.leaves import is_leaf_value, plain_numbers

_MOST_KEYS = 64


class Containment(TracingInterpreter):
    """The part of the interpreter that looks for items in containers."""

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
        if len(mine) != len(other):
            return False
        if kind is dict:
            if left.keys() != right.keys():
                return False
            other = [right[key] for key in left]
        wrap = self.values.wrap
        return all(self.equal(wrap(a), wrap(b)) for a, b in zip(mine, other, strict=True))

    def contains(self, container: Any, item: Any) -> bool:
        """``item in container``."""
        method = python_method(container, "__contains__")
        if method is not None:
            return self.truth(self.ask(method, container, item))
        if isinstance(container, (dict, set, frozenset)):
            return self._is_key(container, item)
        if isinstance(container, (list, tuple)):
            return self._is_among(container, item)
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
        if type(item) in (torch.SymInt, torch.SymFloat):
            keys = list(container)
            if len(keys) <= _MOST_KEYS and all(type(key) in (int, float, bool, str) for key in keys):
                # Number by number: a hash would hold the entry to the number of today.
                self.values.whole(container)
                return any(type(key) is not str and self.equal(item, key) for key in keys)
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

    def _is_among(self, container: Any, item: Any) -> bool:
        """``item in`` a list or tuple."""
        guard_equality(self.values, item)
        self.values.whole(container)
        for entry in container:
            if entry is item or self.values.wrap(entry) is item:
                return True
            if isinstance(entry, torch.Tensor) or isinstance(item, torch.Tensor):
                raise Break("a container of tensors is searched", "compare with `is` in a loop")
            if not (is_leaf_value(entry) and is_leaf_value(item)) and self.equal(entry, item):
                return True
        # Among leaves, which compare natively; all others have been compared.
        return is_leaf_value(item) and any(is_leaf_value(entry) and entry == item for entry in container)

    def search(self, container: Any, name: str, args: tuple[Any, ...]) -> Any:
        item, *bounds = (plain_numbers(given) for given in args)
        self.values.whole(container)
        kind: Any = list if isinstance(container, list) else tuple
        entries = [self.values.wrap(entry) for entry in kind.__iter__(container)]
        if all(map(is_leaf_value, (item, *entries))):
            found = [entry == item for entry in entries]
        else:
            if any(isinstance(entry, torch.Tensor) and entry is not item for entry in (item, *entries)):
                raise Break("a container of tensors is searched", "compare with `is` in a loop")
            found = []
            for entry in entries:
                found.append(entry is item or self.equal(entry, item))
                if found[-1] and name != "count" and not bounds:
                    break
        if name == "count":
            return sum(found)
        try:
            place = found.index(True, *bounds)
        except ValueError:
            if kind is list and name == "index":
                raise ValueError(f"{item!r} is not in list") from None
            raise ValueError(f"{kind.__name__}.{name}(x): x not in {kind.__name__}") from None
        if name == "remove":
            self.effects.delete_item(container, place)
        return place if name == "index" else None
