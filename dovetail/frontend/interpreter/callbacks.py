"""Native code that calls Python methods of the user's objects: it would run them without the interpreter seeing it.

``items[index]`` asks an index for its ``__index__``, ``sum(objects)`` adds them by their ``__radd__``. Reads of such
a method would not be guarded, and its writes would be made at capture only. A call with arguments that have methods of this kind is
watched, and the graph breaks before the first of them begins.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.call_tables import OWN_MODULES, runs_natively
from dovetail.frontend.values.leaves import is_leaf_value

#: Special methods that no native code calls because it is handed an object: they make it, or are asked for by name.
_OTHERS = frozenset(
    {"__init__", "__new__", "__call__", "__getattr__", "__getattribute__", "__setattr__", "__delattr__"}
)
_CONTAINERS = (list, tuple, set, frozenset, deque)

Codes = dict[types.CodeType, str]


def callback_codes(values: Iterable[Any], without: frozenset[str] = frozenset()) -> Codes:
    """The code of the special methods, written in Python, that native code may call on these values and their items.

    >>> class Position:
    ...     def __index__(self):
    ...         return 1
    >>> list(callback_codes([2, Position(), "text"]).values())
    ['Position.__index__']
    """
    found: Codes = {}
    _collect(values, found, set(), set())
    return {code: name for code, name in found.items() if name.rpartition(".")[2] not in without} if without else found


#: Values that native code reaches through values of Python's own; rules add more.
PARTS: list[tuple[Any, Callable[[Any], Iterable[Any]]]] = [
    (_CONTAINERS, lambda value: next(kind for kind in _CONTAINERS if isinstance(value, kind)).__iter__(value)),
    (dict, lambda value: (*dict.keys(value), *dict.values(value))),
    (slice, lambda value: (value.start, value.stop, value.step)),
]


def _collect(values: Iterable[Any], found: Codes, seen: set[type], inside: set[int]) -> None:
    for value in values:
        kind = type(value)
        parts = next((parts for kinds, parts in PARTS if isinstance(value, kinds)), None)
        if parts is not None and id(value) not in inside:
            inside.add(id(value))
            _collect(parts(value), found, seen, inside)
        # The interpreter's own generators and iterators may inherit from Python's.
        is_own = _module(kind).startswith(OWN_MODULES)
        if kind in seen or is_own or isinstance(value, (torch.Tensor, type)) or is_leaf_value(value):
            continue
        seen.add(kind)
        for owner in kind.__mro__:
            # Torch's own settings are guarded as a whole where they are handed over.
            if owner is object or runs_natively(_module(owner)) or _module(owner).split(".")[0] == "torch":
                continue
            for name, method in type.__getattribute__(owner, "__dict__").items():
                method = method.__func__ if type(method) in (classmethod, staticmethod) else method
                is_special = (name[:2] == name[-2:] == "__" and name not in _OTHERS) or name == "keys"
                if is_special and type(method) is types.FunctionType and not runs_natively(method.__module__ or ""):
                    found.setdefault(method.__code__, f"{owner.__name__}.{name}")


def _module(kind: type) -> str:
    name = kind.__module__
    return name if type(name) is str else ""


@contextlib.contextmanager
def watched(function: Any, codes: Codes) -> Iterator[None]:
    """Raise :class:`Break` where a native call is about to run one of these methods; the method does not begin."""
    if not codes:
        yield
        return
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or str(function)

    def note(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            raise Break(
                f"{name} calls {codes[frame.f_code]} from native code, where nobody sees what it reads and writes",
                "call the method yourself, and hand over what it returns",
            )

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
