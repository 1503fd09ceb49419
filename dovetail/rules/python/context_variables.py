"""``contextvars.ContextVar``: its value is read again at each call; what the program sets is set when the graph has run."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import CalleeSource, Equals, Step

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


class SetInside:
    """The token of a variable that the program has set. Where it leaves, a recipe sets the variable and has the real token."""

    def __init__(self, variable: ContextVar[Any], value: Any, earlier: list[SetInside]) -> None:
        self.variable, self.value = variable, value
        self._earlier = earlier
        self.is_built = self.is_reset = False

    def __recipe__(self) -> tuple[Any, ...]:
        if self.is_reset:
            raise CaptureError("the token of a context variable that was reset leaves the function")
        if any(not (one.is_built or one.is_reset) for one in self._earlier):
            raise CaptureError("one of several tokens of context variables leaves the function")
        self.is_built = True
        return ContextVar.set, (self.variable, self.value)


class ContextVariables:
    """What one capture has set, in order."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter
        self._set: list[SetInside] = []
        interpreter.effects.defer(self._effects)

    def last(self, variable: ContextVar[Any]) -> SetInside | None:
        """The latest value that the program has given a variable and not taken back."""
        found = (one for one in reversed(self._set) if one.variable is variable and not one.is_reset)
        return next(found, None)

    def set(self, variable: ContextVar[Any], value: Any) -> SetInside:
        """``variable.set(value)``."""
        token = SetInside(variable, value, [*self._set])
        self._set.append(token)
        self._interpreter.created(token)
        return token

    def _effects(self) -> list[Effect]:
        return [Effect(CalleeSource(), "call", [_keep, [one], {}]) for one in self._set if not one.is_reset]


def _keep(token: Any) -> None:
    """What an effect calls: the variable is set when its token is made."""


def _check(interpreter: TracingInterpreter, variable: Any) -> None:
    if interpreter.values.in_backward or type(variable) is not ContextVar:
        raise Break("a context variable is used in a backward", "use it in the forward")


@rule(ContextVar.get)
def _get(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    variable = args[0]
    _check(interpreter, variable)
    token = interpreter.state(ContextVariables).last(variable)
    if token is not None:
        return token.value
    values = interpreter.values
    source = values.source_of(variable) or values.pin(variable, variable.name)
    value = variable.get(_UNSET)
    if value is not _UNSET:
        return values.read(value, CurrentValue(source))
    values.guard(HasValue(source), Equals(False), f"{source.name}.get() was called")
    return variable.get(*args[1:], **kwargs)  # raises, or is the default


@rule(ContextVar.set)
def _set(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    _check(interpreter, args[0])
    if len(args) != 2 or kwargs:
        raise Break("ContextVar.set is called with other arguments", "give it one value")
    return interpreter.state(ContextVariables).set(*args)


@rule(ContextVar.reset)
def _reset(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    _check(interpreter, args[0])
    token = interpreter.state(ContextVariables).last(args[0])
    if token is None or len(args) != 2 or token is not args[1]:
        raise Break(
            "a context variable is reset to what it was before an earlier set()", "reset it outside of the function"
        )
    token.is_reset = True
