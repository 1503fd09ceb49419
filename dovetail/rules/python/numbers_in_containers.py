"""Loops over containers of numbers of which some change from call to call: each item is read when its turn comes.

All else that goes through a container reads it as a whole, and each number is held to what it is. A loop, and the builtin
functions that only go through what they are given, take the items one by one, so that those that change are symbols.
"""

from __future__ import annotations

import collections
import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, operator_rule, rule
from dovetail.frontend.values.leaves import is_leaf_value, plain_numbers
from dovetail.guards import ItemSource
from dovetail.guards.reading import plain_items, plain_keys, plain_length
from dovetail.rules.sizes.places import check_numbers, end_before_growth
from dovetail.trace import ShapePolicy

_DICTIONARIES = (dict, collections.defaultdict, collections.OrderedDict)
_CONSUMERS = (sum, list, tuple, max, min, sorted, enumerate, any, all)
#: Instructions that take the items of an iterable.
_TAKING = ("GET_ITER", "LIST_EXTEND", "UNPACK_EX", "UNPACK_SEQUENCE")

#: A longer list is read as a whole where an item is taken out: a symbol for each item costs more than it gives.
_MOST_TAKEN = 32


class _Entries(Iterator[Any]):
    """An iterator over the values or items of a dictionary that existed before."""

    def __init__(
        self, interpreter: TracingInterpreter, owner: dict[Any, Any], entry: Callable[[Any, Any], Any]
    ) -> None:
        self._values = interpreter.values
        self._owner = owner
        self._entry = entry
        self._keys = iter(owner)

    def _at(self, key: Any) -> Any:
        value, source = dict.__getitem__(self._owner, key), self._values.item_source(self._owner, key)
        return self._entry(key, self._values.read(value, source))

    def __next__(self) -> Any:
        return self._at(next(self._keys))

    def __recipe__(self) -> tuple[Any, ...]:
        """Outside of the capture it is an iterator over the rest; see :mod:`dovetail.runtime.recipe`."""
        return iter, ([self._at(key) for key in copy.copy(self._keys)],)


class _Items(Iterator[Any]):
    """An iterator over a list, tuple or deque that existed before."""

    def __init__(self, interpreter: TracingInterpreter, owner: Any) -> None:
        self._interpreter = interpreter
        self._owner = owner
        # It says where the end is, and that a deque was written to.
        self._inner = iter(owner)
        self._place = -1

    def __next__(self) -> Any:
        next(self._inner)
        self._place += 1
        return self._interpreter.load_item(self._owner, self._place)

    def __recipe__(self) -> tuple[Any, ...]:
        """Outside of the capture it is the iterator itself where it stands; see :mod:`dovetail.runtime.recipe`."""
        parts: tuple[Any, ...] = self._inner.__reduce__()[:3]
        return parts


def _some_change(interpreter: TracingInterpreter, container: Any) -> bool:
    """Whether a container existed before, and some number in it was seen to change."""
    values, shapes = interpreter.values, interpreter.trace.settings.shapes
    source = values.source_of(container)
    if source is None or values.in_backward or not any(name.startswith(source.name) for name in shapes.numbers):
        return False
    before = values.journal.before(container)
    keys = plain_keys(before) if isinstance(before, dict) else range(plain_length(before))
    items = dict.values(before) if isinstance(before, dict) else plain_items(before)
    return any(_changes(shapes, item, ItemSource(source, key).name) for key, item in zip(keys, items, strict=True))


def _changes(shapes: ShapePolicy, item: Any, name: str) -> bool:
    if type(item) in (int, float):
        return shapes.is_symbolic_number(item, name, False)
    return shapes.has_symbolic_items(type(item), name) and is_leaf_value(item)


@operator_rule(iter)
def _go_through(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    (container,) = operands
    if type(container) not in (list, tuple, collections.deque) or not _some_change(interpreter, container):
        return NotImplemented
    check_numbers(interpreter, container)
    interpreter.guard_length(container)
    return _Items(interpreter, container)


def _only_gone_through(interpreter: TracingInterpreter) -> bool:
    """Whether the result of this call goes into a loop, or a function or instruction that takes its items and nothing else."""
    frame = interpreter.frames[-1]
    rest = iter(frame.decoded.instructions[frame.position + 1 :])
    following = next((item for item in rest if item.opname != "PRECALL"), None)
    if following is None or following.opname in _TAKING:
        return following is not None
    callees = frame.stack[-2:]
    is_call = following.opname == "CALL" and following.arg == 1
    return is_call and any(item is known for item in callees for known in _CONSUMERS)


def _view(method: Any, entry: Callable[[Any, Any], Any]) -> None:
    @rule(method)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) in _DICTIONARIES:
            owner = args[0]
            if _only_gone_through(interpreter) and _some_change(interpreter, owner):
                interpreter.values.guard_keys(owner)
                return _Entries(interpreter, owner, entry)
        if not args or not isinstance(args[0], dict):
            return interpreter.native(method, args, kwargs)
        return interpreter.call_container_method(args[0], method.__get__(args[0]), args[1:], kwargs)


for _kind in (dict, collections.OrderedDict):
    _view(_kind.items, lambda key, value: (key, value))
    _view(_kind.values, lambda key, value: value)


# --- items that are taken out and put in -----------------------------------------------------------------------------


def _is_read_by_items(interpreter: TracingInterpreter, owner: list[Any]) -> bool:
    """Read each item of a short list with numbers that change by itself: what is left of them is what the program makes of it."""
    if type(owner) is not list or len(owner) > _MOST_TAKEN or not _some_change(interpreter, owner):
        return False
    items = [interpreter.load_item(owner, place) for place in range(len(owner))]
    interpreter.guard_length(owner)
    interpreter.effects.touch_all(owner)
    owner[:] = items
    return True


@rule(list.pop)
def _pop(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if not args or not isinstance(args[0], list):
        return interpreter.native(list.pop, args, kwargs)
    owner, *places = args
    if not kwargs and _is_read_by_items(interpreter, owner):
        return owner.pop(*map(plain_numbers, places))
    return interpreter.call_container_method(owner, list.pop.__get__(owner), tuple(places), kwargs)


@rule(list.insert)
def _insert(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if len(args) != 3 or not isinstance(args[0], list):
        return interpreter.native(list.insert, args, kwargs)
    owner, place, item = args
    end_before_growth(interpreter, owner)
    if not kwargs and type(place) is int and _is_read_by_items(interpreter, owner):
        return owner.insert(place, item)
    return interpreter.call_container_method(owner, list.insert.__get__(owner), (place, item), kwargs)


# --- copies -----------------------------------------------------------------------------------------------------------


def _read(interpreter: TracingInterpreter, value: Any) -> Any:
    """A dictionary with numbers that change as one that the program has made; all else as it is."""
    return interpreter.items_of(value) if type(value) is dict and _some_change(interpreter, value) else value


@rule(dict.copy)
def _copy(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if not args or not isinstance(args[0], dict):
        return interpreter.native(dict.copy, args, kwargs)
    read = _read(interpreter, args[0]) if len(args) == 1 and not kwargs else args[0]
    method = dict.copy.__get__(args[0])
    return read if read is not args[0] else interpreter.call_container_method(args[0], method, args[1:], kwargs)


@rule(dict.update)
def _update(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if not args or not isinstance(args[0], dict):
        return interpreter.native(dict.update, args, kwargs)
    owner, *others = args
    given = tuple(_read(interpreter, other) for other in others)
    return interpreter.call_container_method(owner, dict.update.__get__(owner), given, kwargs)


@operator_rule(operator.or_, operator.ior)
def _merge(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    left, right = operands
    read = left if function is operator.ior else _read(interpreter, left), _read(interpreter, right)
    return NotImplemented if read[0] is left and read[1] is right else interpreter.operate(function, *read)
