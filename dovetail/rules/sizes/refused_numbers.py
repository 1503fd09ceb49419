"""Numbers that change, where torch or Python refuses a symbol in their place: ``tensor.new_empty(...).random_(n)``.

The capture begins again with the number as it is, and this is remembered: another number is another capture, and not one that
fails besides. Whether an error is about a symbol is told by its text; any other is the program's own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, error_rule
from dovetail.guards import ComputedSource, FloatSource, NumberSource, Source
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import trees as private_trees
from dovetail.trace import CaptureSettings, Retry
from dovetail.trace.settings import AS_SYMBOL


@error_rule
def _hold_numbers(interpreter: TracingInterpreter, error: BaseException, operands: Arguments) -> None:
    """Raise :class:`Retry` where a call has failed because of a symbol for a number."""
    if "Sym" not in str(error):
        return
    settings = interpreter.trace.settings
    leaves = [*private_trees.tree_leaves(operands), getattr(error, "obj", None)]
    names = {name for item in leaves if private_sizes.is_symbolic(item) for name in _names(interpreter, item)}
    refused = {name for name in names & settings.shapes.numbers if settings.allows(name + AS_SYMBOL)}
    if not refused:
        return

    def with_numbers(settings: CaptureSettings) -> CaptureSettings:
        shapes = dataclasses.replace(settings.shapes, numbers=settings.shapes.numbers - refused)
        strategies = [name + AS_SYMBOL for name in refused]
        return functools.reduce(CaptureSettings.giving_up, strategies, dataclasses.replace(settings, shapes=shapes))

    reason = f"no symbol can be in the place of {', '.join(sorted(refused))}: {error}"
    raise Retry(reason, change=with_numbers) from error


def _names(interpreter: TracingInterpreter, number: Any) -> Iterator[str]:
    """The names of the numbers that a symbolic number was computed of."""
    bindings, guards = interpreter.trace.bindings(), interpreter.values.guards
    for symbol in private_sizes.symbols_of(private_sizes.first_expression(number)):
        if symbol in bindings.symbols:
            carrier = guards.tensor_source(bindings.symbols[symbol][0])
            if isinstance(carrier, (NumberSource, FloatSource)):
                yield from _bases(carrier.base)


def _bases(source: Source) -> Iterator[str]:
    if not isinstance(source, ComputedSource):
        yield source.name
        return
    for item in source.arguments:
        if isinstance(item, Source):
            yield from _bases(item)
