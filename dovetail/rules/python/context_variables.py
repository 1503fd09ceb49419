"""``contextvars.ContextVar``: its value is read again at each call; the graph breaks where the program sets it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import Equals, Step
from dovetail.rules.refusals import refuse

_UNSET = object()


@dataclass(frozen=True)
class CurrentValue(Step):
    """The value of a context variable in the thread or task of the call; raises LookupError where it has none."""

    @property
    def name(self) -> str:
        """As the program writes it."""
        return f"{self.base.name}.get()"

    def read(self, value: Any) -> Any:
        """The value now."""
        if type(value) is not ContextVar:
            raise TypeError("no context variable")
        return value.get()


@dataclass(frozen=True)
class HasValue(Step):
    """Whether a context variable has a value."""

    @property
    def name(self) -> str:
        """A question that a program asks by an error."""
        return f"{self.base.name} has a value"

    def read(self, value: Any) -> bool:
        """Whether it has one now."""
        if type(value) is not ContextVar:
            raise TypeError("no context variable")
        return value.get(_UNSET) is not _UNSET


@rule(ContextVar.get)
def _get(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    variable, values = args[0], interpreter.values
    if values.in_backward or type(variable) is not ContextVar:
        raise Break("a context variable is read in a backward", "read it in the forward")
    source = values.source_of(variable) or values.pin(variable, variable.name)
    value = variable.get(_UNSET)
    if value is not _UNSET:
        return values.read(value, CurrentValue(source))
    values.guard(HasValue(source), Equals(False), f"{source.name}.get() was called")
    return variable.get(*args[1:], **kwargs)  # raises, or is the default


refuse((ContextVar.set, ContextVar.reset), "ContextVar.{name} is called")
