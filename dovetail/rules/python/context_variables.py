"""``contextvars.ContextVar``: its value is read again at each call; the graph breaks where the program sets it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import ComputedSource, Equals
from dovetail.rules.refusals import refuse

_UNSET = object()


def _current_value(variable: Any) -> Any:
    """The value of a context variable in the thread or task of the call; a mark where it has none."""
    if type(variable) is not ContextVar:
        raise TypeError("no context variable")
    return variable.get(_UNSET)


def _has_value(variable: Any) -> bool:
    return _current_value(variable) is not _UNSET


@rule(ContextVar.get)
def _get(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    variable, values = args[0], interpreter.values
    if values.in_backward or type(variable) is not ContextVar:
        raise Break("a context variable is read in a backward", "read it in the forward")
    source = values.source_of(variable) or values.pin(variable, variable.name)
    value = variable.get(_UNSET)
    if value is not _UNSET:
        return values.read(value, ComputedSource(_current_value, (source,), f"{source.name}.get()"))
    has_value = ComputedSource(_has_value, (source,), f"{source.name} has a value")
    values.guard(has_value, Equals(False), f"{source.name}.get() was called")
    return variable.get(*args[1:], **kwargs)  # raises, or is the default


refuse((ContextVar.set, ContextVar.reset), "ContextVar.{name} is called")
