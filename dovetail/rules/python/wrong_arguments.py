"""Builtin functions that are called with too few or too many arguments, or with keywords: Python's own error.

The rules of these functions take their arguments as they come.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, CallRule, Keywords, rule
from dovetail.rules.python.conversions import as_answered

_COUNTS: dict[Any, tuple[float, float]] = {
    **dict.fromkeys((len, callable, repr, id, ascii, hash, reversed), (1, 1)),
    **dict.fromkeys((isinstance, issubclass, hasattr, delattr), (2, 2)),
    **dict.fromkeys((iter, next, format), (1, 2)),
    **dict.fromkeys((bool, list, tuple, set, frozenset), (0, 1)),
    divmod: (2, 2),
    getattr: (2, 3),
    setattr: (3, 3),
    type: (1, 3),
    super: (0, math.inf),
}
"""How many arguments a function takes; a keyword is given only where a class is made."""


def _check(known: CallRule, function: Any, interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """The call by the ``known`` rule, if the function takes so many arguments."""
    least, most = _COUNTS[function]
    is_wrong = (kwargs and (function is not type or len(args) < most)) or not least <= len(args) <= most
    if is_wrong or (function in (getattr, hasattr) and not isinstance(args[1], str)) or _is_no_call(function, args):
        return function(*args, **kwargs)  # raises
    found = known(interpreter, args, kwargs)
    if function is iter and not hasattr(type(found), "__next__"):
        as_answered(iter, "__iter__", args[0], found)  # raises
    return found


def _is_no_call(function: Any, args: Arguments) -> bool:
    """Whether ``iter`` is to call until a value comes what cannot be called."""
    return function is iter and len(args) == 2 and not callable(args[0])


for _function in _COUNTS:
    if _function in rule:
        rule[_function] = functools.partial(_check, rule[_function], _function)
