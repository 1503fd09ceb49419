"""A size that was marked as one that changes, and that the program holds to a number all the same: a warning, or an error.

After a graph break the number may be that of a value which crosses the break: it was made of the marked size, and no mark says so.
There all sizes become symbolic, and what is held to a number all the same is at most warned of.
"""

from __future__ import annotations

import dataclasses
import functools

from dovetail.errors import InputError, RecompileLimitWarning
from dovetail.face.warnings import warn_user
from dovetail.frontend.code.resumption import Resumption
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import end_rule
from dovetail.guards.guard import GuardFailure
from dovetail.guards.source import CalleeSource
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.settings import CaptureSettings, Retry
from dovetail.trace.shapes import marks_of


@end_rule
def _held_to_a_number(interpreter: TracingInterpreter) -> None:
    if not interpreter.trace.settings.shapes.marked:
        return
    for traced in interpreter.trace.inputs:
        real = traced.real
        # torch.compile raises where mark_dynamic is not kept, and takes maybe_mark_dynamic and mark_unbacked as they come.
        marked = functools.partial(private_sizes.marked_dimensions, real)
        strict, lenient = marked("dynamic") | marked("strict_unbacked"), marked("weak_dynamic") | marked("unbacked")
        for dimension in marks_of(real):
            size = traced.node.meta["val"].shape[dimension]
            if not private_sizes.is_symbolic(size) or private_sizes.expression_of(size).free_symbols:
                continue
            of = f"dimension {dimension} of `{traced.name}`"
            text = str(GuardFailure(f"{of} was marked as dynamic, and the program holds it to {int(size)}"))
            goes_on = any(type(value) is Resumption for value, at in interpreter.values.noted() if at == CalleeSource())
            if goes_on and not interpreter.trace.settings.shapes.everything:
                raise Retry(f"{of} is marked, and values of its size cross a graph break", change=_for_all_sizes)
            if dimension in strict and not goes_on:
                raise InputError(
                    text, advice="use torch._dynamo.maybe_mark_dynamic, or make the program right for every size"
                )
            if dimension not in lenient:
                warn_user(f"{text}: each other size compiles another entry", RecompileLimitWarning)


def _for_all_sizes(settings: CaptureSettings) -> CaptureSettings:
    return dataclasses.replace(settings, shapes=dataclasses.replace(settings.shapes, everything=True))


@end_rule
def _outside_of_its_bounds(interpreter: TracingInterpreter) -> None:
    """A size that is no symbol, since it lies outside of the bounds with which it was marked."""
    for traced in interpreter.trace.inputs:
        for dimension, (low, high) in private_sizes.marked_ranges(traced.real).items():
            size = traced.real.shape[dimension]
            # As for torch.compile, 0 and 1 are sizes of their own.
            if size > 1 and not ((low or 0) <= size and (high is None or size <= high)):
                raise InputError(
                    f"dimension {dimension} of `{traced.name}` was marked as {marks_of(traced.real)[dimension]}, and is {size}",
                    advice="mark it with bounds that it keeps, or leave it unmarked",
                )
