"""Rules for functions of the standard library whose own code looks at frames, at identities or at global registries."""

from __future__ import annotations

import bisect
import collections
import copy
import dataclasses
import functools
import inspect
import logging
import operator
import os
import sys
import traceback
import types
import typing
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.generator import shown_type
from dovetail.frontend.interpreter.opaque import guard_deep
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, code_rule, rule
from dovetail.guards import Answers


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@rule(functools.partial)
def _partial(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    # Nothing is called yet: the function stays the one that the interpreter will call.
    return _call(functools.partial, *args, **kwargs)


def _search(function: Any, is_right: bool) -> None:
    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        if kwargs or len(args) != 2 or not isinstance(args[0], (list, tuple)):
            return interpreter.call_native(function, args, kwargs)
        items, wanted = interpreter.drain(args[0]), args[1]
        low, high = 0, len(items)
        while low < high:
            middle = (low + high) // 2
            operands = (wanted, items[middle]) if is_right else (items[middle], wanted)
            if interpreter.truth(interpreter.operate(operator.lt, *operands)) is is_right:
                high = middle
            else:
                low = middle + 1
        return low


_search(bisect.bisect_right, is_right=True)
_search(bisect.bisect_left, is_right=False)


@rule(vars)
def _vars(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if not args:
        raise Break("vars() hands out the frame's variables", "do this outside of the compiled function")
    if isinstance(args[0], types.ModuleType):
        raise Break("vars() hands out a module's dictionary", "read the attributes that you need")
    return interpreter.load_attribute(args[0], "__dict__")


@rule(sys.exc_info)
def _exc_info(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    error = interpreter.handled_exception(interpreter.frames[-1])
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


@rule(sys.exception)
def _exception(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    return interpreter.handled_exception(interpreter.frames[-1])


def _looks_at_frames(function: Any) -> None:
    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        reason = f"{function.__module__}.{function.__name__} looks at the frames that are running"
        raise Break(reason, "do this outside of the compiled function")


for _function in (sys._getframe, inspect.currentframe, inspect.stack, inspect.trace):
    _looks_at_frames(_function)
for _name in traceback.__all__:
    if inspect.isfunction(getattr(traceback, _name)):
        _looks_at_frames(getattr(traceback, _name))


@rule(logging.Logger.isEnabledFor)
def _is_enabled_for(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> bool:
    return _asked_of_logger(interpreter, logging.Logger.isEnabledFor, *args, *kwargs.values())


@rule(logging.Logger.getEffectiveLevel)
def _effective_level(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> int:
    return _asked_of_logger(interpreter, logging.Logger.getEffectiveLevel, *args)


def _asked_of_logger(interpreter: TracingInterpreter, function: Any, logger: logging.Logger, *arguments: Any) -> Any:
    # Levels are inherited, cached and overridden for all loggers at once: the question itself is asked again.
    answer = function(logger, *arguments)
    source = interpreter.values.pin(logger, f"logging.getLogger({logger.name!r})")
    interpreter.values.guard(source, Answers(function, arguments, answer), "the level of a logger was asked for")
    return answer


@rule(os.fspath)
def _fspath(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    (path,) = args
    if isinstance(path, (str, bytes)):
        return path
    return interpreter.call(interpreter.load_attribute(path, "__fspath__"), (), {})


@rule(inspect.isgenerator)
def _is_generator(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> bool:
    return issubclass(shown_type(args[0]), types.GeneratorType)


@rule(dataclasses._process_class)  # type: ignore[attr-defined]
def _process_class(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if not interpreter.is_created(args[0]):
        raise Break("a class that existed before the call is made a dataclass", "do this outside of the function")
    made = dataclasses._process_class(*args, **kwargs)  # type: ignore[attr-defined]
    interpreter.created(made)
    return made


@rule(typing.cast)
def _cast(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    return args[1] if len(args) > 1 else kwargs["val"]


@rule(collections.namedtuple)
def _namedtuple(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    module = interpreter.frames[-1].globals.get("__name__", "__main__")
    made = _call(collections.namedtuple, *args, **{"module": module, **kwargs})
    interpreter.created(made)
    return made


def _inner_code(function: Any, name: str) -> types.CodeType:
    return next(item for item in function.__code__.co_consts if getattr(item, "co_name", None) == name)


_DISPATCH = _inner_code(functools.singledispatch, "dispatch")


@code_rule(id(_DISPATCH))
def _dispatched(
    interpreter: TracingInterpreter, function: types.FunctionType, args: Arguments, kwargs: Keywords
) -> Any:
    """The function that ``singledispatch`` finds for a class, without its cache, whose keys are weak references."""
    cell = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))["registry"]
    interpreter.guard_closure(function)
    registry = interpreter.read_cell(cell)
    interpreter.values.whole(registry)
    found = function(*args)
    for key, implementation in registry.items():
        if implementation is found:
            return interpreter.load_item(registry, key)
    raise Break("singledispatch finds a function that is not registered", "call it outside of the function")


@rule(collections._count_elements)  # type: ignore[attr-defined]
def _count_elements(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> None:
    counts, items = args
    for item in interpreter.drain(items):
        known = interpreter.call(counts.get, (item, 0), {})
        interpreter.store_item(counts, item, known + 1)


@rule(copy.deepcopy)
def _deepcopy(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if len(args) != 1 or kwargs:
        raise Break("copy.deepcopy is called with a memo", "copy outside of the function")
    guard_deep(interpreter.values, args[0], set())
    return copy.deepcopy(args[0])
