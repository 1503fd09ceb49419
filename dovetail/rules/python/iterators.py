"""Iterators over iterables: ``zip``, ``map``, ``filter``, ``enumerate``. Items are read by the interpreter, callbacks run in it."""

from __future__ import annotations

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


def called_for_items(interpreter: TracingInterpreter, function: Any) -> Any:
    """A function that native code calls for each item: also a builtin one goes through the interpreter, for the items' methods."""
    if isinstance(function, (type, *NATIVE_CALLABLES)):
        return interpreter.trampoline(function)
    return interpreter.called_argument(function)
