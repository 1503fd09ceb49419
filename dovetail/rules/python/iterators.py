"""Iterators, also those of itertools that call functions: items are read by the interpreter, callbacks run in it."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Iterator
from typing import Any

from dovetail.frontend.callee import code_of
from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.builtin_rules import WrappingIterator
from dovetail.frontend.interpreter.call_tables import NATIVE_CALLABLES
from dovetail.frontend.interpreter.callbacks import callback_codes
from dovetail.frontend.interpreter.lookup import python_method
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, callable_rule, first_rule, rule


@first_rule
def _generator_function(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A generator function or coroutine that is compiled itself: its body does not run when it is called."""
    code = None if interpreter.frames else code_of(function)
    if code is not None and code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        raise Break(
            f"{code.co_qualname} is a generator function: its body runs later, a piece at each next()",
            "compile what it calls, or return a list",
        )
    return NotImplemented


@rule(iter)
def _iter(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if len(args) == 2:
        return iter(interpreter.trampoline(args[0]), args[1])
    return interpreter.iterate(args[0])


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


def _items(interpreter: TracingInterpreter, value: Any) -> Iterator[Any]:
    """The items of an iterable, read by the interpreter when they are asked for."""
    iterator = interpreter.iterate(value)
    while True:
        done, item = interpreter.advance(iterator)
        if done:
            return
        yield item


def _gone_through(interpreter: TracingInterpreter, value: Any) -> Any:
    """A stand-in for an iterable of the program's own: nobody watches native code that goes through it later."""
    if type(value) is list and interpreter.native_argument(value) is not value:
        # Native code would go through a copy, and miss what the program puts into the list meanwhile.
        return WrappingIterator(interpreter, interpreter.iterate(value))
    methods = (python_method(value, name) for name in ("__iter__", "__next__", "__getitem__"))
    if type(value).__module__.startswith("dovetail.") or not any(methods):
        return value
    return WrappingIterator(interpreter, _items(interpreter, value))


def _calls(function: Any, at: int | None = None, default: Any = None) -> None:
    """A function that calls its argument at this place (else ``default``), and what it is given by keyword."""

    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        def given(item: Any) -> Any:
            return called_for_items(interpreter, item) if callable(item) else item

        if default is not None and len(args) == at and "func" not in kwargs and callback_codes(args):
            args = (*args, interpreter.trampoline(default))
        if function is itertools.filterfalse and args and args[0] is None and callback_codes(args):
            args = (interpreter.trampoline(bool), *args[1:])
        if function is itertools.compress and len(args) == 2 and callback_codes(args[1:]):
            truths = (interpreter.call(bool, (item,), {}) for item in _items(interpreter, args[1]))
            args = (args[0], WrappingIterator(interpreter, truths))
        arguments = tuple(
            given(item) if place == at else _gone_through(interpreter, item) for place, item in enumerate(args)
        )
        return interpreter.call_native(function, arguments, {key: given(item) for key, item in kwargs.items()})


for _function in (functools.reduce, itertools.starmap, itertools.filterfalse, itertools.takewhile, itertools.dropwhile):
    _calls(_function, 0)
_calls(itertools.accumulate, 1, operator.add)
_calls(itertools.groupby, 1)
for _iterator in (itertools.chain, itertools.zip_longest, itertools.compress, itertools.islice, itertools.cycle):
    _calls(_iterator)
_calls(itertools.pairwise)


@rule(itertools.chain.from_iterable)
def _chain_of_all(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if isinstance(args[0], tuple):
        parts = [_gone_through(interpreter, item) for item in interpreter.drain(args[0])]
        return interpreter.call_native(itertools.chain, tuple(parts), kwargs)
    later = (_gone_through(interpreter, item) for item in _items(interpreter, args[0]))
    return interpreter.values.wrap(itertools.chain.from_iterable(later))


def called_for_items(interpreter: TracingInterpreter, function: Any) -> Any:
    """A function that native code calls for each item: also a builtin one goes through the interpreter, for the items' methods."""
    if isinstance(function, (type, *NATIVE_CALLABLES)) or type(function) in callable_rule:
        return interpreter.trampoline(function)
    return interpreter.called_argument(function)
