"""Who receives a message: handlers, filters, formatters, and what shows a warning.

A message is given after the graph. Nobody notices, unless what receives it shares state with the program: a handler that counts,
where the program reads the count, or two that write to one list. So the graph breaks at a message that code of the user's own
receives, or an object that the program knows; handlers of Python and of installed libraries share nothing with it.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import AttributeSource, Equals, Identity, ItemSource, Length, PinnedSource
from dovetail.rules.python.rare_instructions import is_library_module

_MOST_OBJECTS = 20_000
_ITEMS = (list, tuple, set, frozenset, deque)


def _loggers(logger: logging.Logger) -> Iterator[logging.Logger]:
    """The loggers whose handlers get the messages of one."""
    found: logging.Logger | None = logger
    while found is not None:
        yield found
        found = found.parent if found.propagate else None


def receivers_of(function: Callable[..., Any]) -> list[Any]:
    """The objects that get the messages given by a method of a logger, or by ``warnings.warn``.

    >>> logger = logging.Logger("alone")
    >>> logger.addHandler(logging.NullHandler())
    >>> [type(item).__name__ for item in receivers_of(logger.info)]
    ['NullHandler']
    """
    if function is warnings.warn:
        shown: list[Any] = [warnings.showwarning, warnings.formatwarning, vars(warnings).get("_showwarnmsg_impl")]
        is_logged = getattr(warnings.showwarning, "__module__", None) == "logging"
        return [*shown, sys.stderr, *(receivers_of(logging.getLogger("py.warnings").warning) if is_logged else ())]
    logger = getattr(function, "__self__", logging.root)
    found = [item for one in _loggers(logger) for item in one.handlers]
    factory = logging.getLogRecordFactory()
    own = [] if factory is logging.LogRecord else [factory]
    return [*found, *logger.filters, *own, *([] if found else [sys.stderr])]


def guard_receivers(interpreter: TracingInterpreter, function: Callable[..., Any]) -> None:
    """Guard that the same handlers get the messages at another call."""
    values = interpreter.values
    if function is warnings.warn:
        return
    for logger in _loggers(getattr(function, "__self__", logging.root)):
        source = values.pin(logger, f"logger {logger.name!r}")
        reason = "a message was given"
        values.guard(AttributeSource(source, "propagate"), Equals(logger.propagate), reason)
        handlers = AttributeSource(source, "handlers")
        values.guard(handlers, Length(len(logger.handlers)), reason)
        for index, handler in enumerate(logger.handlers):
            values.guard(ItemSource(handlers, index), Identity(handler), reason)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, _ITEMS):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        yield from (value.__self__, getattr(value, "__func__", None))
    elif not isinstance(value, (type, types.ModuleType, types.FunctionType, logging.Logger, logging.LogRecord)):
        yield from getattr(value, "__dict__", {}).values()


def _is_users(value: Any) -> bool:
    """Whether this is a function of the user's own, or an object of such a class."""
    kind = value if isinstance(value, (type, types.FunctionType)) else type(value)
    name = kind.__module__ or ""
    return name.split(".", 1)[0] != "dovetail" and not is_library_module(sys.modules.get(name))


def share_state(interpreter: TracingInterpreter, functions: list[Callable[..., Any]]) -> bool:
    """Whether the program may see what those change that receive the messages of these functions."""
    noted = (*interpreter.values.noted(), *interpreter.effects.written_containers())
    known = {id(value) for value, source in noted if not isinstance(source, PinnedSource)}
    waiting = [item for function in functions for item in receivers_of(function)]
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen or is_leaf_value(value):
            continue
        if id(value) in known or _is_users(value) or len(seen) > _MOST_OBJECTS:
            return True
        seen[id(value)] = value
        waiting += _parts(value)
    return False
