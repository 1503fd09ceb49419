"""Messages: a log record or a warning is an effect, given at every call with that call's numbers, after the graph has run.

The logger sees the program's own lines as its callers. A message whose arguments are tensors or objects breaks the graph, since
these may change before the graph has run; a message that the logger's level drops is only a guard on that.

Texts of numbers that change (:mod:`.texts_of_numbers`) are written when the message is given.
"""

from __future__ import annotations

import dis
import functools
import logging
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.interpreter.shown_frames import show_place
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, end_rule, rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import CalleeSource, ComputedSource, Equals, Identity
from dovetail.rules.python.message_receivers import guard_receivers, share_state
from dovetail.rules.python.texts_of_numbers import TAKES_TEXTS, is_text
from dovetail.rules.refusals import refuse
from dovetail.runtime.shown_frames import calling_code
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace import Retry

#: Names of methods of loggers, each with the level of the message that it gives.
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
    "log": None,
}
#: The methods and functions that give a message, each with its level.
METHODS = {getattr(logging.Logger, name): level for name, level in LEVELS.items() if hasattr(logging.Logger, name)}
_FUNCTIONS = {getattr(logging, name): level for name, level in LEVELS.items() if hasattr(logging, name)}
AFTER_THE_GRAPH = "messages after the graph"


# --- messages at every call --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """A call that only gives its arguments as a message, made in the name of the program's lines.

    ``frames`` are the program's, outermost first.
    """

    function: Callable[..., Any]
    frames: tuple[tuple[types.CodeType, dis.Positions, dict[str, Any]], ...]

    def __call__(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Give the message."""
        call: Callable[[], Any] = functools.partial(self.function, *args, **kwargs)
        for code, place, variables in reversed(self.frames):
            call = functools.partial(eval, calling_code(code, place, call), variables, {})
        return call()

    def __recipe__(self) -> tuple[Callable[[], Message], list[Any]]:
        """It is the same object at every call."""
        return self._itself, []

    def _itself(self) -> Message:
        return self


class _Given:
    """The functions by which messages of one capture were given."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self.functions: list[Callable[..., Any]] = []


@end_rule
def _check_receivers(interpreter: TracingInterpreter) -> None:
    """Messages that somebody waits for are given where the program gives them."""
    functions = interpreter.state(_Given).functions
    if functions and share_state(interpreter, functions):
        raise Retry("what receives a message shares state with the function", without=AFTER_THE_GRAPH)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return is_leaf_value(value) or isinstance(value, type) or private_sizes.is_symbolic(value) or is_text(value)


def _check(interpreter: TracingInterpreter, values: Arguments) -> None:
    if interpreter.values.in_backward:
        raise Break("a message is given in a backward", "give it in the forward")
    if not all(map(_is_plain, values)):
        raise Break("a message with an object in it", "give it outside of the function, or put numbers into it")
    if not interpreter.trace.settings.allows(AFTER_THE_GRAPH):
        reason = "what receives a message (a handler, a filter) shares state with the function"
        raise Break(reason, "give the message outside of the function, or keep that state apart")


def _give(interpreter: TracingInterpreter, function: Callable[..., Any], args: Arguments, kwargs: Keywords) -> None:
    """Have a message given after the graph, at every call."""
    _check(interpreter, (*args, *kwargs.values()))
    guard_receivers(interpreter, function)
    interpreter.state(_Given).functions.append(function)
    frames = tuple((frame.code, show_place(frame), frame.globals) for frame in interpreter.frames)
    effect = Effect(CalleeSource(), "call", [Message(function, frames), [list(args), dict(kwargs)], {}])
    interpreter.effects.defer(lambda: [effect])


@dataclass(frozen=True)
class _Drops:
    """Whether a logger drops messages of a level."""

    level: int

    def __call__(self, logger: logging.Logger) -> bool:
        return not logger.isEnabledFor(self.level)


def _is_dropped(interpreter: TracingInterpreter, logger: logging.Logger, level: int) -> bool:
    if not _Drops(level)(logger):
        return False
    source = interpreter.values.pin(logger, f"logger {logger.name!r}")
    what = f"whether {logger.name!r} drops messages of level {level}"
    interpreter.values.guard(ComputedSource(_Drops(level), (source,), what), Equals(True), "a message was dropped")
    return True


def _log(function: Callable[..., Any], level: int | None) -> None:
    is_method = function in METHODS

    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        logger = args[0] if is_method and args else logging.root
        rest = args[1:] if is_method else args
        asked = level if level is not None else rest[0] if rest else None
        if not isinstance(logger, logging.Logger) or type(asked) is not int:
            return interpreter.call_torch(function, args, kwargs)
        if _is_dropped(interpreter, logger, asked):
            return None
        if function.__name__ == "exception" or kwargs.get("exc_info"):
            raise Break("a message shows the exception that is handled", "give it outside of the function")
        if not is_method and not logging.root.handlers:
            raise Break("a message configures the logging module", "call logging.basicConfig first")
        source = interpreter.values.source_of(logger) if is_method else None
        if source is not None:
            interpreter.values.guard(source, Identity(logger), f"{source.name} gives a message")
        bound = types.MethodType(function, logger) if is_method else function
        _give(interpreter, bound, rest, kwargs)
        return None


TAKES_TEXTS.update((warnings.warn, *METHODS, *_FUNCTIONS))
for _table in (METHODS, _FUNCTIONS):
    for _function, _level in _table.items():
        _log(_function, _level)


def _interpret(function: types.FunctionType) -> None:
    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        return interpreter.run_function(function, args, kwargs)


for _name, _function in vars(logging.LoggerAdapter).items():
    if _name in LEVELS or _name in ("isEnabledFor", "process"):
        _interpret(_function)
refuse(
    (
        *(getattr(logging.Logger, name) for name in ("setLevel", "addHandler", "removeHandler", "handle")),
        *(logging.Logger.callHandlers, logging.Filterer.addFilter, logging.Filterer.removeFilter),
        *(logging.Handler.setLevel, logging.Handler.handle, logging.basicConfig, logging.disable),
        *(logging.captureWarnings, logging.setLoggerClass),
    ),
    "logging's {name} is called",
)


# --- warnings ----------------------------------------------------------------------------------------------------------


def _may_raise(module: types.ModuleType) -> bool:
    return any(item[0] == "error" for item in module.filters)


class _Blocks:
    """How many ``with warnings.catch_warnings():`` of the program are open; they are entered for real while capturing."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self.open = 0


@rule(warnings.catch_warnings.__enter__)
def _enter_block(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if getattr(args[0], "_record", False):
        # Later code may read the list, and the warning about a break would land in it.
        raise Break("warnings are recorded in a list", "record them outside of the function", resumable=False)
    result = interpreter.native(warnings.catch_warnings.__enter__, args, kwargs)
    interpreter.state(_Blocks).open += 1
    return result


@rule(warnings.catch_warnings.__exit__)
def _leave_block(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    result = interpreter.native(warnings.catch_warnings.__exit__, args, kwargs)
    interpreter.state(_Blocks).open -= 1
    return result


def _is_ignored(interpreter: TracingInterpreter) -> bool:
    """Whether a block of the program ignores all warnings; a break where it decides otherwise."""
    if interpreter.state(_Blocks).open:
        if [(item[0], item[2]) for item in warnings.filters[:1]] == [("ignore", Warning)]:
            return True
        advice = "warn outside of warnings.catch_warnings"
        raise Break("a warning is given in a block that filters warnings", advice, resumable=False)
    return False


@rule(warnings.warn)
def _warn(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> None:
    if _is_ignored(interpreter):
        return
    if _may_raise(warnings):
        raise Break("a warning may raise an error", "warn outside of the function, or do not make warnings errors")
    level = kwargs.get("stacklevel", args[2] if len(args) > 2 else 1)
    if type(level) is int and level > len(interpreter.frames):
        raise Break("a warning is given in the name of a caller of the compiled function", "use a smaller stacklevel")
    source = ComputedSource(
        _may_raise, (interpreter.values.pin(warnings, "warnings"),), "whether warnings raise errors"
    )
    interpreter.values.guard(source, Equals(False), "a warning was given")
    _give(interpreter, warnings.warn, args, kwargs)
