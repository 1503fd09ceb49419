"""A stretch of NumPy after a graph break runs for real as one: each call and operator on arrays would break the graph again.

Before each instruction the ones ahead are tried on a copy of the frame, as long as they only load values and compute with plain
numbers. If they come to work on an array, they run for real up to there; if not, the graph begins here.
"""

from __future__ import annotations

import copy
import inspect
import operator
import types
import weakref
from typing import Any

import torch

from dovetail.frontend.code.frame import Frame, Return, Yield, decode
from dovetail.frontend.interpreter.lookup import MISSING, class_attribute, instance_dict
from dovetail.frontend.interpreter.machine import Machine
from dovetail.frontend.rules import real_rule
from dovetail.rules.python.numpy_numbers import ARRAY, SCALAR
from dovetail.runtime.recipe_builder import ITERATOR_TYPES

_MOST_INSTRUCTIONS = 200
_NUMBERS = (int, float, complex, bool, str, type(None))
_CONTAINERS = (list, tuple, dict)
_PURE = frozenset({range, reversed, len, enumerate, zip, min, max, abs, round, int, float, bool, isinstance})
_RANGES = (type(iter(range(0))), type(iter(range(1 << 70))))
_ITERATORS = {*ITERATOR_TYPES, *(type(iter(kind(0))) for kind in ARRAY)}
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class _WorkError(Exception):
    """The instruction works on an array."""


class _EndError(Exception):
    """The instruction does something else, which a graph may hold."""


def _parts(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    if kind is slice:
        return value.start, value.stop, value.step
    return tuple(value.values()) if kind is dict else tuple(value) if kind in (tuple, list) else (value,)


def _holds(kinds: Any, *values: Any) -> bool:
    return any(isinstance(item, kinds) for value in values for item in _parts(value))


def _is_numpys(value: Any) -> bool:
    """Whether this is an object, a function or a method of NumPy's."""
    kind = type(value)
    is_bound = class_attribute(kind, "__self__")[0] is not MISSING and not isinstance(value.__self__, types.ModuleType)
    module = value.__module__ if class_attribute(kind, "__module__")[0] is not MISSING else ""
    modules = (module, kind.__module__, type(value.__self__).__module__ if is_bound else "")
    return any(isinstance(name, str) and name.split(".", 1)[0] == "numpy" for name in modules)


_GENERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _is_numeric(function: types.FunctionType, seen: set[types.CodeType]) -> bool:
    """Whether all names of a function lead to NumPy, numbers, builtins, or other such functions."""
    found = [*(cell.cell_contents for cell in function.__closure__ or ()), *(function.__defaults__ or ())]
    if function.__code__.co_flags & _GENERATES:
        return False
    codes = [function.__code__]
    for code in codes:
        seen.add(code)
        codes += [item for item in code.co_consts if type(item) is types.CodeType]
        for item in decode(code).instructions:
            if item.opname == "IMPORT_NAME":
                return False
            if item.opname == "LOAD_GLOBAL" and item.argval in function.__globals__:
                found.append(function.__globals__[item.argval])
    return all(
        type(item) in _NUMBERS
        or _is_numpys(item)
        or (type(item) is types.ModuleType and item.__name__.split(".", 1)[0] in ("numpy", "math"))
        or (type(item) is types.FunctionType and (item.__code__ in seen or _is_numeric(item, seen)))
        for item in found
    )


def _goes_through_arrays(value: Any) -> bool:
    """Whether this is an iterator over arrays, or one over such iterators."""
    if type(value) not in _ITERATORS or getattr(type(value), "__reduce__", None) is object.__reduce__:
        # From Python 3.14 on, iterators of itertools do not say what they go through.
        return False
    return any(_holds(ARRAY, item) or _goes_through_arrays(item) for item in value.__reduce__()[1])


class _Ahead(Machine):
    """Runs a copy of a frame up to the next work on an array; what has effects ends it."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        twin = object.__new__(Frame)
        for name in Frame.__slots__:
            value = getattr(frame, name)
            setattr(twin, name, value.copy() if type(value) in (list, dict) else value)
        self.frames = [twin]
        self._old = {id(item) for item in frame.stack}
        self._fresh: list[Any] = []

    def count(self) -> int:
        """How many instructions there are up to the end of the next work on an array; 0 where something else comes first."""
        (frame,) = self.frames
        for count in range(1, _MOST_INSTRUCTIONS):
            try:
                outcome = self._one(frame)
            except _WorkError:
                return count
            except Exception:  # noqa: BLE001  (the program's own error: the instruction meets it again)
                return 0
            if isinstance(outcome, (Return, Yield)):
                return 0
            frame.position = frame.position + 1 if outcome is None else outcome
        return 0

    @staticmethod
    def _decide(*values: Any) -> None:
        """The instruction is work where it is given an array or one of NumPy's numbers, and no tensor."""
        if _holds(ARRAY, *values) or (_holds(SCALAR, *values) and not _holds(torch.Tensor, *values)):
            raise _WorkError

    def _only(self, kinds: tuple[type, ...], *values: Any) -> None:
        self._decide(*values)
        if not all(type(item) in kinds for item in values):
            raise _EndError

    # --- the protocol -------------------------------------------------------------------------------------------------

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False) -> Any:
        # An object of the user's that can be called may have a __getattr__.
        is_method = isinstance(function, (types.BuiltinFunctionType, types.MethodType))
        owner, given = function.__self__ if is_method else None, (*args, *kwargs.values())
        if isinstance(owner, torch.Tensor):
            if function.__name__ == "numpy":
                raise _WorkError
            if function.__name__ not in ("detach", "cpu") or given:
                raise _EndError
            return owner
        if _is_numpys(function):
            raise _WorkError
        if type(function) is types.FunctionType and _is_numeric(function, set()):
            if any(map(_goes_through_arrays, given)):
                raise _WorkError
            self._only((*_NUMBERS, *_CONTAINERS), *given)
        if isinstance(function, (types.BuiltinFunctionType, types.MethodWrapperType)) or function in _PURE:
            self._decide(*given)
        if function not in _PURE or not all(type(item) in (*_NUMBERS, range, type) for item in given):
            raise _EndError
        return function(*args, **kwargs)

    def load_attribute(self, target: Any, name: str) -> Any:  # type: ignore[override]
        if isinstance(target, types.ModuleType) and name in vars(target):
            return vars(target)[name]
        if _is_numpys(target) or type(target) in (*_CONTAINERS, *_NUMBERS):
            return getattr(target, name)
        if type(target) in _TENSORS and name in ("detach", "cpu", "numpy"):
            return getattr(target, name)
        attributes = instance_dict(target)
        is_plain = class_attribute(type(target), "__getattribute__")[1] is object
        if not is_plain or attributes is None or class_attribute(type(target), name)[0] is not MISSING:
            raise _EndError
        return attributes[name]

    def load_item(self, target: Any, key: Any) -> Any:  # type: ignore[override]
        self._decide(target, key)
        self._only(_CONTAINERS, target)
        self._only((*_NUMBERS, slice), key)
        return target[key]

    def operate(self, function: Any, *operands: Any) -> Any:
        self._only((*_NUMBERS, *_CONTAINERS) if function is operator.contains else _NUMBERS, *operands)
        return function(*operands)

    def truth(self, value: Any) -> bool:  # type: ignore[override]
        self._only((*_NUMBERS, *_CONTAINERS), value)
        return bool(value)

    def formatted(self, frame: Frame, value: Any, specification: str) -> str:
        self._only(_NUMBERS, value)
        return format(value, specification)

    def iterate(self, value: Any) -> Any:  # type: ignore[override]
        if isinstance(value, ARRAY) or _goes_through_arrays(value):
            return iter(value)
        self._only((list, tuple, range, *_RANGES), value)
        self._fresh.append(copy.copy(iter(value)))
        return self._fresh[-1]

    def advance(self, iterator: Any) -> tuple[bool, Any]:
        if _goes_through_arrays(iterator):
            raise _WorkError
        if not any(iterator is item for item in self._fresh):
            raise _EndError
        return super().advance(iterator)

    def drain(self, value: Any, is_hinted: bool = False) -> list[Any]:
        self._only((list, tuple), value)
        return list(value)

    def change(self, container: Any, method: str, *args: Any) -> None:
        if id(container) in self._old:
            self._ends(*args)
        super().change(container, method, *args)

    def _ends(self, *values: Any) -> Any:
        """An effect: of what the program does with arrays, or the end."""
        self._decide(*values)
        raise _EndError

    store_attribute: Any = _ends
    store_item: Any = _ends
    store_global: Any = _ends
    store_cell: Any = _ends
    delete_attribute: Any = _ends
    delete_item: Any = _ends
    delete_global: Any = _ends
    delete_cell: Any = _ends
    make_generator: Any = _ends
    restorer: Any = _ends
    send: Any = _ends
    items_of: Any = _ends
    close_generator: Any = _ends


#: For each code the places, with the types of what the frame holds, from which it came to no work on an array: looking ahead took
#: 65 to 135 us of each call with one graph break. Where a place is here wrongly, there is one more graph break.
_ELSEWHERE: weakref.WeakKeyDictionary[types.CodeType, set[Any]] = weakref.WeakKeyDictionary()
_MOST_PLACES = 256


@real_rule
def _to_the_next_array(frame: Frame) -> int:
    if not ARRAY:
        return 0
    if (known := _ELSEWHERE.get(frame.code)) is None:
        known = _ELSEWHERE[frame.code] = set()
    # Identities keep no class of the program's alive. A bool decides about the way: from Python 3.13 on a comparison gives one.
    held = [item if item is True or item is False else id(type(item)) for item in frame.stack]
    place = frame.position, *map(id, map(type, frame.locals.values())), *held
    if place in known:
        return 0
    count = _Ahead(frame).count()
    if not count and len(known) < _MOST_PLACES:
        known.add(place)
    return count
