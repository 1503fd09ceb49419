"""Rules for functions of the standard library whose own code looks at frames, at identities or at global registries."""

from __future__ import annotations

import collections
import functools
import inspect
import logging
import os
import sys
import traceback
import types
import typing
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.builtin_rules import own_check
from dovetail.frontend.interpreter.callbacks import callback_codes, watched
from dovetail.frontend.interpreter.lookup import python_method
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import Answers
from dovetail.rules.python.conversions import as_answered
from dovetail.rules.refusals import refuse


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@rule(functools.partial)
def _partial(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    # Nothing is called yet: the function stays as it is, for the interpreter to call.
    return _call(functools.partial, *args, **kwargs)


rule[delattr] = lambda interpreter, args, kwargs: interpreter.delete_attribute(*args)
rule[callable] = lambda interpreter, args, kwargs: callable(*args)


@rule(vars)
def _vars(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if not args:
        raise Break("vars() hands out the frame's variables", "do this outside of the compiled function")
    if len(args) > 1 or kwargs:
        return vars(*args, **kwargs)  # raises
    if isinstance(args[0], types.ModuleType):
        raise Break("vars() hands out a module's dictionary", "read the attributes that you need")
    try:
        return interpreter.load_attribute(args[0], "__dict__")
    except AttributeError:
        return vars(args[0])  # raises


@rule(sys.exc_info)
def _exc_info(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    error = interpreter.handled_exception()
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


@rule(sys.exception)
def _exception(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    return interpreter.handled_exception()


_LOOK_AT_FRAMES: list[Any] = [sys._getframe, inspect.currentframe, inspect.stack, inspect.trace]
_LOOK_AT_FRAMES += filter(inspect.isfunction, map(vars(traceback).get, traceback.__all__))
for _function in _LOOK_AT_FRAMES:
    refuse((_function,), f"{_function.__module__}.{{name}} looks at the frames that are running")
refuse((torch.func.linearize,), "torch.func.linearize traces the function by itself")


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
    method = python_method(args[0], "__fspath__") if len(args) == 1 and not kwargs else None
    if method is None:
        return os.fspath(*args, **kwargs)
    return as_answered(os.fspath, "__fspath__", args[0], interpreter.call(types.MethodType(method, args[0]), (), {}))


@rule(typing.cast)
def _cast(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    return args[1] if len(args) > 1 else kwargs["val"]


@rule(collections._count_elements)  # type: ignore[attr-defined]
def _count_elements(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> None:
    counts, items = args
    for item in interpreter.drain(items):
        known = interpreter.call(counts.get, (item, 0), {})
        interpreter.store_item(counts, item, known + 1)


@rule(object.__reduce_ex__)
def _reduce(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """Reduce an object for ``copy.copy``: by its ``__reduce__``, and other methods of its class."""
    method = python_method(args[0], "__reduce__") if args else None
    if method is not None:
        return interpreter.call(types.MethodType(method, args[0]), (), {})
    with watched(object.__reduce_ex__, callback_codes(args[:1])):
        return interpreter.call_native(object.__reduce_ex__, args, kwargs)


@rule(issubclass)
def _issubclass(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> bool:
    if len(args) != 2 or not isinstance(args[0], type):
        return issubclass(*args)
    kind, kinds = args
    if isinstance(kinds, tuple):
        interpreter.values.whole_deep(kinds)
        return any(_issubclass(interpreter, (kind, item), {}) for item in kinds)
    check = own_check(kinds, "__subclasscheck__")
    if check is not None:
        return bool(interpreter.truth(interpreter.call(check, (kinds, kind), {})))
    interpreter.guard_order(kind)
    interpreter.guard_registration(kind, kinds)
    return issubclass(kind, kinds)
