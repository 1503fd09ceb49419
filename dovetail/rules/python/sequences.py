"""Builtin functions that go through their arguments: items are read by the interpreter, callbacks run in it."""

from __future__ import annotations

import bisect
import functools
import operator
import sys
from collections import deque
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.builtin_rules import WrappingIterator
from dovetail.frontend.interpreter.callbacks import callback_codes, watched
from dovetail.frontend.interpreter.lookup import python_method
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import STAND_INS, Arguments, Keywords, operator_rule, rule
from dovetail.frontend.values.leaves import is_leaf_value, plain_numbers
from dovetail.guards.reading import plain_items, plain_keys
from dovetail.rules.python.iterators import called_for_items
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing

# From Python 3.14 on a tuple is made without asking how many items there will be.
_ASK_FOR_THE_LENGTH = (list, tuple) if sys.version_info < (3, 14) else (list,)


def _sequence(kind: Any) -> Any:
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        if kind in (tuple, frozenset) and args and type(args[0]) is kind:
            return args[0]
        items = interpreter.drain(args[0], is_hinted=kind in _ASK_FOR_THE_LENGTH) if args else []
        return kind(map(interpreter.as_key, items)) if issubclass(kind, (set, frozenset)) else kind(items)

    return handler


for _kind in (list, tuple, set, frozenset):
    rule[_kind] = _sequence(_kind)


@rule(dict)
def _dict(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> dict[Any, Any]:
    if len(args) != 1:
        return dict(*args, **kwargs)  # raises, where there are more
    (source,) = args
    pairs = interpreter.items_of(source) if hasattr(source, "keys") else interpreter.drain(source)
    if not isinstance(pairs, dict):
        for pair in pairs:
            if isinstance(pair, (tuple, list)) and len(pair) == 2:
                interpreter.as_key(pair[0])
    return dict(pairs, **kwargs)


_MOST_KEYS = 64
_SEARCHED = (dict, set, frozenset, list, tuple, deque)


@operator_rule(operator.contains)
def _is_among(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """Whether a symbolic number is a key or an item, number by number: its hash would hold the entry to the number of today,
    and so would a search (``if step in (1000, 2000)``).
    """
    container, number = operands
    if type(number) not in (torch.SymInt, torch.SymFloat) or not isinstance(container, _SEARCHED):
        return NotImplemented
    keys = plain_items(container) if not isinstance(container, dict) else list(plain_keys(container))
    if len(keys) > _MOST_KEYS or not all(type(key) in (int, float, bool, str) for key in keys):
        return NotImplemented
    if python_method(container, "__contains__") is not None:
        return NotImplemented
    if isinstance(container, dict):
        interpreter.values.guard_keys(container)
    else:
        interpreter.values.whole(container)
    numbers = [int(key) if type(key) is bool else key for key in keys if type(key) is not str]
    return any(interpreter.truth(interpreter.operate(operator.eq, number, key)) for key in numbers)


@rule(dict.get)
def _get(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """``rates.get(step, rate)``: a symbolic number that is no key is held to none of the keys, and to nothing else."""
    if not args or not isinstance(args[0], dict):
        return interpreter.native(dict.get, args, kwargs)
    owner, *rest = args
    is_number = bool(rest) and type(rest[0]) is torch.SymInt and not private_sizes.is_data_number(rest[0])
    if (
        is_number
        and len(rest) < 3
        and not kwargs
        and _is_among(interpreter, operator.contains, (owner, rest[0])) is False
    ):
        return rest[1] if len(rest) == 2 else None
    return interpreter.call_container_method(owner, dict.get.__get__(owner), tuple(rest), kwargs)


# --- reductions -------------------------------------------------------------------------------------------------------


def _any_or_all(function: Any) -> None:
    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        if len(args) != 1 or kwargs:
            return interpreter.call_native(function, args, kwargs)
        # One item after the other: making them may have effects, and those after the first hit are never made.
        return function(map(interpreter.truth, WrappingIterator(interpreter, interpreter.iterate(args[0]))))


_any_or_all(any)
_any_or_all(all)


@rule(sum)
def _sum(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if not 0 < len(args) < 3 or not kwargs.keys() <= {"start"}:
        return interpreter.call_native(sum, args, kwargs)
    total: Any = args[1] if len(args) > 1 else kwargs.get("start", 0)
    if isinstance(total, (str, bytes, bytearray)):
        return sum((), total)  # Python's error.
    items: list[Any] = interpreter.drain(args[0])
    if not callback_codes((total, *items)) and not any(type(item) is torch.SymFloat for item in items):
        return _run(interpreter, sum, (items, total), {})
    number = interpreter.derive(sum, (total, *items))
    if number is not NotImplemented:
        return number
    for item in items:
        total = interpreter.operate(operator.add, total, item)
    return total


def _ordering(function: Any) -> None:
    """``min``, ``max`` and ``sorted``."""

    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        is_choice = function is not sorted and len(args) > 1
        if is_choice and not kwargs:
            chosen = _of_numbers(interpreter, function, args)
            if chosen is not NotImplemented:
                return chosen
        given = args if is_choice or not args else (interpreter.drain(args[0], is_hinted=function is sorted), *args[1:])
        given = tuple(interpreter.native_argument(item) if callable(item) else item for item in given)
        key = kwargs.get("key")
        keywords = kwargs if key is None else {**kwargs, "key": called_for_items(interpreter, key)}
        if callback_codes((*given, *keywords.values())):
            keywords = {**keywords, "key": functools.partial(_Compared, interpreter, keywords.get("key"))}
        return _run(interpreter, function, given, keywords)


def _of_numbers(interpreter: TracingInterpreter, function: Any, numbers: Arguments) -> Any:
    """``max`` or ``min`` where some number is made of data, a tensor or a stand-in, else NotImplemented."""
    kinds = (torch.Tensor, *STAND_INS)
    if not any(isinstance(item, kinds) or private_sizes.is_data_number(item) for item in numbers):
        return NotImplemented
    for handler in operator_rule.get(function, ()):
        chosen = handler(interpreter, function, numbers)
        if chosen is not NotImplemented:
            return chosen
    return interpreter.derive(function, numbers)


def _run(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    codes = {} if "key" in kwargs else callback_codes((*args, *kwargs.values()))
    try:
        with watched(function, codes):
            return interpreter.values.wrap(function(*args, **kwargs))
    except private_tracing.DATA_DEPENDENT_ERRORS as error:
        raise Break(f"{function.__name__} needs the values of a tensor") from error


class _Compared:
    """An item as native code orders it: the user's own comparisons are interpreted."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, interpreter: TracingInterpreter, key: Any, item: Any) -> None:
        self._interpreter = interpreter
        self._value = item if key is None else key(item)

    def __lt__(self, other: Any) -> bool:
        return bool(self._interpreter.truth(self._interpreter.operate(operator.lt, self._value, other._value)))

    def __gt__(self, other: Any) -> bool:
        return bool(self._interpreter.truth(self._interpreter.operate(operator.gt, self._value, other._value)))


for _function in (min, max, sorted):
    _ordering(_function)


def _bisection(function: Any) -> None:
    """``bisect_left`` and ``bisect_right`` among constants; objects of the program would be compared by native code."""

    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        changes = len(args) == 2 and not kwargs and type(args[1]) in (torch.SymInt, torch.SymFloat)
        if changes and type(args[0]) in (list, tuple) and not private_sizes.is_data_number(args[1]):
            return _place_of(interpreter, function is bisect.bisect_right, *args)
        given, named = [plain_numbers(item) for item in args], {name: plain_numbers(kwargs[name]) for name in kwargs}
        for item in (*given, *named.values()):
            if not (all(map(is_leaf_value, item)) if type(item) is list else is_leaf_value(item)):
                return interpreter.call_native(function, args, kwargs)
        for item in (*args, *kwargs.values()):
            interpreter.values.whole_deep(item)
        return function(*given, **named)


def _place_of(interpreter: TracingInterpreter, is_behind: bool, items: Any, number: Any) -> int:
    """The place of a number that changes, as ``bisect`` finds it: a guard for each comparison, and not for the number."""
    first, end = 0, interpreter.call(len, (items,), {})
    while first < end:
        middle = (first + end) // 2
        item = interpreter.load_item(items, middle)
        pair = (number, item) if is_behind else (item, number)
        if interpreter.truth(interpreter.operate(operator.lt, *pair)) is is_behind:
            end = middle
        else:
            first = middle + 1
    return first


_bisection(bisect.bisect_left)
_bisection(bisect.bisect_right)
