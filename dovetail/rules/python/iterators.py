"""Iterators, also those of itertools that call functions: items are read by the interpreter, callbacks run in it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from dovetail.frontend.interpreter.builtin_rules import WrappingIterator
from dovetail.frontend.interpreter.call_tables import NATIVE_CALLABLES
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule


@rule(next)
def _next(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    done, value = interpreter.advance(args[0])
    if not done:
        return value
    if len(args) > 1:
        return args[1]
    raise StopIteration() if value is None else StopIteration(value)


def _calling(function: Any, most: int | None) -> None:
    """An iterator that calls its first argument for each item of the others, of which there are at ``most`` so many."""

    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        if not args:
            return function(**kwargs)
        called, *items = args
        called = interpreter.truth if called is None else called_for_items(interpreter, called)
        given = [WrappingIterator(interpreter, interpreter.iterate(item)) for item in items[:most]]
        return interpreter.values.wrap(function(called, *given, *items[len(given) :], **kwargs))


_calling(map, None)
_calling(filter, 1)


def _calls(function: Any, at: int) -> None:
    """A function that calls its argument at this place, and what it is given by keyword."""

    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        def given(item: Any) -> Any:
            return interpreter.called_argument(item) if callable(item) else item

        arguments = tuple(given(item) if place == at else item for place, item in enumerate(args))
        return interpreter.call_native(function, arguments, {key: given(item) for key, item in kwargs.items()})


for _function in (functools.reduce, itertools.starmap, itertools.filterfalse, itertools.takewhile, itertools.dropwhile):
    _calls(_function, 0)
_calls(itertools.accumulate, 1)
_calls(itertools.groupby, 1)


def called_for_items(interpreter: TracingInterpreter, function: Any) -> Any:
    """A function that native code calls for each item: also a builtin one goes through the interpreter, for the items' methods."""
    if isinstance(function, (type, *NATIVE_CALLABLES)):
        return interpreter.trampoline(function)
    return interpreter.called_argument(function)
