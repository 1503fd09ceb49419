"""``functools.singledispatch``, ``singledispatchmethod`` and ``__subclasses__``: what follows from a class is guarded.

Python keeps it in weak references, which nobody could guard; so it is asked for again at each call.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, rule, wrapper_rule
from dovetail.guards import ComputedSource, ItemSource, Length

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


def _subclasses(kind: type) -> tuple[type, ...]:
    return tuple(type.__subclasses__(kind))


@rule(type.__subclasses__)
def _subclasses_so_far(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if kwargs or len(args) != 1 or not isinstance(args[0], type):
        return interpreter.native(type.__subclasses__, args, kwargs)
    values, kind = interpreter.values, args[0]
    name = f"{kind.__qualname__}.__subclasses__()"
    found, source = _subclasses(kind), ComputedSource(_subclasses, (values.pin(kind, kind.__qualname__),), name)
    values.guard(source, Length(len(found)), f"{name} was called")
    return [values.read(item, ItemSource(source, position)) for position, item in enumerate(found)]
