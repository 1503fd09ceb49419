"""Builtin functions that are called with too few or too many arguments, or with keywords: Python's own error.

The rules of these functions take their arguments as they come.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, CallRule, Keywords, rule

_COUNTS: dict[Any, tuple[float, float]] = {
    **dict.fromkeys((len, callable, repr, id), (1, 1)),
    **dict.fromkeys((isinstance, issubclass, hasattr, delattr), (2, 2)),
    **dict.fromkeys((iter, next), (1, 2)),
    **dict.fromkeys((bool, list, tuple), (0, 1)),
    getattr: (2, 3),
    setattr: (3, 3),
    type: (1, 3),
    super: (0, math.inf),
}
"""How many arguments a function takes; a keyword is given only where a class is made."""


def _check(known: CallRule, function: Any, interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """The call by the ``known`` rule, if the function takes so many arguments."""
    least, most = _COUNTS[function]
    if (kwargs and (function is not type or len(args) < most)) or not least <= len(args) <= most:
        return function(*args, **kwargs)  # raises
    return known(interpreter, args, kwargs)


for _function in _COUNTS:
    if _function in rule:
        rule[_function] = functools.partial(_check, rule[_function], _function)
