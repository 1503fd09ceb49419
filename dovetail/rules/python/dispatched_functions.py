"""``functools.singledispatch`` and ``singledispatchmethod``: which function is called follows from a class, and is guarded.

Their own code looks it up in a cache of weak references, which nobody could guard.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, rule, wrapper_rule
from dovetail.guards import ComputedSource

_DISPATCH: types.CodeType = functools.singledispatch(len).dispatch.__code__  # type: ignore[attr-defined]


def dispatched(dispatch: Any, kind: type) -> Any:
    """The function that is called for objects of a class.

    >>> dispatched(functools.singledispatch(len).dispatch, list) is len
    True
    """
    return dispatch(kind)


@wrapper_rule
def _found(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Instead | None:
    is_one = isinstance(function, types.FunctionType) and function.__code__ is _DISPATCH and len(args) == 1
    return Instead(dispatched, (function, *args), {}) if is_one and not kwargs and isinstance(args[0], type) else None


@rule(dispatched)
def _dispatched(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    dispatch, kind = args
    values = interpreter.values
    values.hold(dispatch)
    source = values.pin(dispatch, "singledispatch")
    return values.read(dispatch(kind), ComputedSource(dispatched, (source, kind), f"dispatch({kind.__qualname__})"))
