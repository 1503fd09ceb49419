"""Who receives a message: handlers, filters, formatters, and what shows a warning. They may be the program's own code.

A message is given after the graph. Nobody notices, unless what receives it shares state with the program: a handler that counts,
where the program reads the count, or two that write to one list. Then the graph breaks at the message. What a receiver can reach
is found by going through the objects that it holds and the names that its functions use.
"""

from __future__ import annotations

import dis
import functools
import logging
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import AttributeSource, Equals, Identity, ItemSource, Length, PinnedSource
from dovetail.rules.python.compared_objects import codes_of

_MOST_OBJECTS = 20_000
_FIXED_MODULES = sys.stdlib_module_names | {"torch", "dovetail"}
_STORES = {dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")}
#: Types of objects that the program and a receiver may share without either changing them.
_SHARED_BY_ALL = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    logging.Logger,
)
_ITEMS = (list, tuple, set, frozenset, deque)


def _is_fixed(module: object) -> bool:
    return not isinstance(module, str) or module.split(".", 1)[0] in _FIXED_MODULES


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


class _Reach:
    """The objects that can be reached from some, and the names of globals that functions among them use and set."""

    def __init__(self, roots: list[Any]) -> None:
        self.objects: dict[int, Any] = {}
        self.used: set[tuple[int, str]] = set()
        self.set: set[tuple[int, str]] = set()
        self.cells_set = False
        waiting = list(roots)
        while waiting and len(self.objects) <= _MOST_OBJECTS:
            value = waiting.pop()
            if id(value) not in self.objects and not is_leaf_value(value):
                self.objects[id(value)] = value
                waiting += self._next(value)
        self.is_complete = not waiting

    def _next(self, value: Any) -> Iterator[Any]:
        if isinstance(value, (types.ModuleType, torch.Tensor)):
            return
        if isinstance(value, types.FunctionType):
            yield from () if _is_fixed(value.__module__) else self._of_function(value)
        elif isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
            yield value.__self__
            yield getattr(value, "__func__", None)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, (staticmethod, classmethod, property)):
            yield from (getattr(value, name, None) for name in ("__func__", "fget", "fset"))
        elif isinstance(value, type):
            for kind in () if _is_fixed(value.__module__) else value.__mro__:
                if not _is_fixed(kind.__module__):
                    yield from vars(kind).values()
        elif isinstance(value, dict):
            yield from (*dict.keys(value), *dict.values(value))
        elif isinstance(value, _ITEMS):
            yield from value
        elif isinstance(value, types.CellType):
            yield _content(value)
        else:
            yield type(value)
            yield from _attributes(value)

    def _of_function(self, function: types.FunctionType) -> Iterator[Any]:
        yield from (function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function))
        table = function.__globals__
        for code in codes_of(function.__code__):
            for name in code.co_names:
                found = table.get(name)
                self.used.add((id(table), name))
                if isinstance(found, types.ModuleType) and not _is_fixed(found.__name__):
                    self.used.update((id(vars(found)), other) for other in code.co_names)
                    yield from (vars(found)[other] for other in code.co_names if other in vars(found))
                yield found
            if _STORES.isdisjoint(code.co_code[::2]):
                continue  # reading all instructions took two thirds of the time
            stores = {(item.opname, item.argval) for item in dis.get_instructions(code) if item.opcode in _STORES}
            self.set.update((id(table), name) for opname, name in stores if opname.endswith("GLOBAL"))
            self.cells_set = self.cells_set or any(opname.endswith("DEREF") for opname, _ in stores)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _attributes(value: Any) -> Iterator[Any]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = None
    if isinstance(own, dict):
        yield own
    for kind in type(value).__mro__:
        for member in vars(kind).values():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield member.__get__(value)
                except AttributeError:
                    continue


def share_state(interpreter: TracingInterpreter, functions: list[Callable[..., Any]]) -> bool:
    """Whether what receives the messages of these functions can reach what the program has read or written of the outside."""
    roots = [item for function in functions for item in receivers_of(function)]
    reach = _Reach(roots)
    if not reach.is_complete:
        return True
    values, effects = interpreter.values, interpreter.effects
    known = [*values.noted(), *effects.written_containers()]
    for value, source in known:
        if id(value) not in reach.objects or isinstance(value, _SHARED_BY_ALL) or isinstance(source, PinnedSource):
            continue
        if not isinstance(value, types.CellType) or reach.cells_set or effects.written(value):
            return True
    items = [guard.source for guard in values.guards.so_far() if isinstance(guard.source, ItemSource)]
    for item in items:
        is_global = isinstance(item.base, PinnedSource) and not item.held.is_object
        if is_global and (id(item.base.fetch(None, (), {})), item.key) in reach.set:
            return True
    written = [value for value, _ in effects.written_containers() if isinstance(value, dict)]
    return any(id(table) == owner and effects.written(table, name) for table in written for owner, name in reach.used)
