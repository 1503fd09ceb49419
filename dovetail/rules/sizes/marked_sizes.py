"""A size that was marked as one that changes, and that the program holds to a number all the same: a warning, or an error."""

from __future__ import annotations

from dovetail.errors import InputError, RecompileLimitWarning
from dovetail.face.warnings import warn_user
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import end_rule
from dovetail.guards.guard import GuardFailure
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.shapes import marks_of


@end_rule
def _held_to_a_number(interpreter: TracingInterpreter) -> None:
    if not interpreter.trace.settings.shapes.marked:
        return
    for traced in interpreter.trace.inputs:
        real = traced.real
        # torch.compile raises where mark_dynamic is not kept, and takes maybe_mark_dynamic and mark_unbacked as they come.
        strict = {
            *getattr(real, "_dynamo_dynamic_indices", ()),
            *getattr(real, "_dynamo_strict_unbacked_indices", ()),
        }
        lenient = {*getattr(real, "_dynamo_weak_dynamic_indices", ()), *getattr(real, "_dynamo_unbacked_indices", ())}
        for dimension in marks_of(real):
            size = traced.node.meta["val"].shape[dimension]
            if not private_sizes.is_symbolic(size) or private_sizes.expression_of(size).free_symbols:
                continue
            of = f"dimension {dimension} of `{traced.name}`"
            text = str(GuardFailure(f"{of} was marked as dynamic, and the program holds it to {int(size)}"))
            if dimension in strict:
                raise InputError(
                    text, advice="use torch._dynamo.maybe_mark_dynamic, or make the program right for every size"
                )
            if dimension not in lenient:
                warn_user(f"{text}: each other size compiles another entry", RecompileLimitWarning)


@end_rule
def _outside_of_its_bounds(interpreter: TracingInterpreter) -> None:
    """A size that is no symbol, since it lies outside of the bounds with which it was marked."""
    for traced in interpreter.trace.inputs:
        for mark in getattr(traced.real, "_dynamo_dynamic_range", ()):
            size, low, high = traced.real.shape[mark.dim], mark.min or 0, mark.max
            # As for torch.compile, 0 and 1 are sizes of their own.
            if size > 1 and not (low <= size and (high is None or size <= high)):
                raise InputError(
                    f"dimension {mark.dim} of `{traced.name}` was marked as {marks_of(traced.real)[mark.dim]}, and is {size}",
                    advice="mark it with bounds that it keeps, or leave it unmarked",
                )
