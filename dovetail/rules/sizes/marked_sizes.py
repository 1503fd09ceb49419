"""A size that was marked as one that changes, and that the program holds to a number all the same: the user is told."""

from __future__ import annotations

from dovetail.errors import RecompileLimitWarning
from dovetail.face.warnings import warn_user
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import end_rule
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.shapes import marks_of


@end_rule
def _held_to_a_number(interpreter: TracingInterpreter) -> None:
    if not interpreter.trace.settings.shapes.marked:
        return
    for traced in interpreter.trace.inputs:
        for dimension in marks_of(traced.real):
            size = traced.node.meta["val"].shape[dimension]
            if private_sizes.is_symbolic(size) and not private_sizes.expression_of(size).free_symbols:
                text = f"dimension {dimension} of {traced.name} was marked as dynamic, and the program holds it to {int(size)}"
                warn_user(f"{text}: each other size compiles another entry", RecompileLimitWarning)
