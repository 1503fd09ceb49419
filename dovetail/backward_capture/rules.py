"""The interpreter's rule for the formulas of autograd nodes in a captured backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.backward_capture.node_functions import NodeFunction
from dovetail.frontend.rules import rule

if TYPE_CHECKING:
    from dovetail.frontend.protocol import TracingInterpreter


@rule(NodeFunction.__call__)
def _call_formula(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the formula natively: it computes on traced tensors like any function of torch."""
    formula, *values = args
    return interpreter.native(formula, tuple(values), kwargs)
