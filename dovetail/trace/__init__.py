"""The open trace: fake, functional and proxy modes, and the tensors handed in."""

from dovetail.trace.trace import Trace, TracedInput

__all__ = ["Trace", "TracedInput"]
