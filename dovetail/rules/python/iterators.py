"""Iterators, also those of itertools that call functions: items are read by the interpreter, callbacks run in it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from dovetail.frontend.interpreter.call_tables import NATIVE_CALLABLES
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule


class WrappingIterator:
    """An iterator whose items went through the interpreter."""

    def __init__(self, interpreter: TracingInterpreter, inner: Any) -> None:
        self.interpreter = interpreter
        self.inner = inner

    def __iter__(self) -> WrappingIterator:
        return self

    def __recipe__(self) -> tuple[Any, tuple[Any, ...]]:
        """Outside of the capture it is the iterator itself; see :mod:`dovetail.runtime.recipe`."""
        return iter, (self.inner,)

    def __next__(self) -> Any:
        done, value = self.interpreter.advance(self.inner)
        if done:
            raise StopIteration
        return value


def _lazy(function: Any, called: int, most: int | None) -> None:
    """An iterator: the first ``called`` arguments are called for each item, at ``most`` as many that follow are gone through."""

    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        stop = len(args) if most is None else called + most
        given: list[Any] = [
            interpreter.truth if item is None else called_for_items(interpreter, item) for item in args[:called]
        ]
        given += [WrappingIterator(interpreter, interpreter.iterate(item)) for item in args[called:stop]]
        return interpreter.values.wrap(function(*given, *args[stop:], **kwargs))


_lazy(zip, 0, None)
_lazy(map, 1, None)
_lazy(filter, 1, 1)
_lazy(enumerate, 0, 1)


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
