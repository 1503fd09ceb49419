"""Functions that ``torch.jit.script`` or ``torch.jit.trace`` has made: their operators are captured, and they are one call of the
program, which a derivative of the backward runs again.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, callable_rule
from dovetail.guards import Identity
from dovetail.trace.trace import open_trace

_EFFECTS = ("prim::Print", "aten::warn", "prim::SetAttr")
#: What the texts of errors have in common that come from asking for the data of traced tensors; TorchScript hides their classes.
_OF_DATA = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "not allocated yet",
)


class _Traced:
    """A scripted function while it is traced: without torch's own formulas for its gradients, which have no second derivative."""

    __module__ = "torch.jit"

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = function.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trace = open_trace()
        with torch.jit.optimized_execution(False):
            if trace is None:
                return self.function(*args, **kwargs)
            with trace.recorder.paused():
                found = self.function(*args, **kwargs)
        trace.recorder.record(self, args, kwargs, found)
        return found


@callable_rule(torch.jit.ScriptFunction)
def _scripted(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    source = interpreter.values.source_of(function)
    if source is not None:
        interpreter.values.guard(source, Identity(function), f"{source.name} was called")
    graph = function.inlined_graph
    if any(graph.findAllNodes(kind) for kind in _EFFECTS):
        raise Break(
            f"the scripted function {function.name} prints, warns or sets an attribute",
            "call it outside of the compiled function",
        )
    try:
        return interpreter.native(_Traced(function), args, kwargs)
    except RuntimeError as error:
        if not any(text in str(error) for text in _OF_DATA):
            raise
        reason = f"the scripted function {function.name} needs the values of a tensor"
        raise Break(reason, "keep the values in tensors, or call it outside of the compiled function") from error
