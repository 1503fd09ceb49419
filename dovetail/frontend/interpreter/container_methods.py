"""Methods of lists, dictionaries and sets: a write is journalled, a read guards the whole container."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.call_tables import SEARCHES, WRITERS
from dovetail.frontend.interpreter.callbacks import callback_codes, watched
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import plain_numbers

# Answers of these about a key are guarded (see :mod:`dovetail.frontend.values.aliases`).
HASHING = frozenset({"__hash__", "__eq__"})
_TAKE_INDEX = ("insert", "pop", "__getitem__", "__setitem__", "__delitem__")


class ContainerMethods(TracingInterpreter):
    """The part of the interpreter that calls methods of lists, dictionaries and sets."""

    def call_container_method(self, owner: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function.__name__
        if name in SEARCHES and isinstance(owner, list) and args and not kwargs:
            return self.search(owner, name, args)
        args = self._with_keys(owner, name, args)
        if isinstance(owner, dict) and name in ("get", "__getitem__", "__contains__") and args:
            return self._look_up(owner, name, args)
        if name == "__setitem__" and isinstance(owner, (list, dict)):
            if isinstance(owner, list):
                self.values.whole(owner)
            self.effects.set_item(owner, *args)
            return None
        if name == "append" and type(owner) is list and len(args) == 1:
            self.effects.append(owner, args[0])
            return None
        if name == "pop" and isinstance(owner, set) and self.values.source_of(owner) is not None:
            raise Break("set.pop takes whichever item comes first in memory", "take a certain item")
        self.values.whole(owner)
        writes = name in WRITERS
        if writes:
            self.effects.touch_all(owner)
            if isinstance(owner, list):
                for position, item in enumerate(owner):
                    if isinstance(item, torch.Tensor):
                        list.__setitem__(owner, position, self.values.wrap(item))
        arguments = tuple(self._container_argument(owner, at, item) for at, item in enumerate(args))
        keywords = {
            key: self.called_argument(item) if key == "key" else self.native_argument(item)
            for key, item in kwargs.items()
        }
        codes = callback_codes((*arguments, *keywords.values(), *(owner if isinstance(owner, list) else ())), HASHING)
        with watched(function, codes):
            result = function(*arguments, **keywords)
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
        if not isinstance(owner, (dict, set)):
            return self.native_argument(item)
        # A tensor is a key there, and the container has the real ones.
        if isinstance(item, torch.Tensor) and at == 0:
            return item
        return self.values.keyed_for(owner, self.native_argument(item))

    def _look_up(self, owner: Any, name: str, args: tuple[Any, ...]) -> Any:
        key = args[0]
        if dict.__contains__(owner, key):
            value = self.values.read(dict.__getitem__(owner, key), self.values.item_source(owner, key))
            return True if name == "__contains__" else value
        self.guard_missing_key(owner, key)
        if name == "__getitem__":
            raise KeyError(key)
        return False if name == "__contains__" else args[1] if len(args) > 1 else None
