"""The open trace: fake, functional and proxy modes, the tensors handed in, and symbolic sizes."""

from dovetail.trace.overrides import RefusedOperatorError
from dovetail.trace.program import Program
from dovetail.trace.settings import CaptureSettings, Findings, Retry
from dovetail.trace.shapes import (
    ASSUMPTION,
    Bindings,
    ShapeGuards,
    ShapePolicy,
    SizeRange,
    can_be_symbolic,
    mark_dynamic,
    marks_of,
    shape_guards,
)
from dovetail.trace.trace import Trace, TracedInput

__all__ = [
    "ASSUMPTION",
    "Bindings",
    "CaptureSettings",
    "Findings",
    "Program",
    "RefusedOperatorError",
    "Retry",
    "ShapeGuards",
    "ShapePolicy",
    "SizeRange",
    "Trace",
    "TracedInput",
    "can_be_symbolic",
    "mark_dynamic",
    "marks_of",
    "shape_guards",
]
