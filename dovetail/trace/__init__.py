"""The open trace: fake, functional and proxy modes, and the tensors handed in."""

from dovetail.trace.program import Program
from dovetail.trace.trace import Trace, TracedInput

__all__ = ["Program", "Trace", "TracedInput"]
