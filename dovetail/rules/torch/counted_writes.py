"""Operators in place that write nothing: ``x.view(3, 2).t_()`` changes a view, ``conj_physical_`` of real numbers nothing at all.

Autograd counts them for every tensor of the memory, like a write, and so does the call.
"""

from __future__ import annotations

import torch

from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import end_rule
from dovetail.guards import CalleeSource
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace.settings import RECOMPUTES


@end_rule
def _count(interpreter: TracingInterpreter) -> None:
    trace = interpreter.trace
    if not trace.settings.allows(RECOMPUTES):
        # The program itself runs, call by call.
        return
    counted = []
    for item in trace.inputs:
        again = sum(change.input_index == item.index for change in trace.metadata_changes)
        is_same = trace.node_of(item.value) is item.node
        if is_same or (again and not private_tensors.is_written(item.value)):
            counted += [item.value] * (private_tensors.version_of(item.value) - item.original_version - again)
    if counted:
        effect = Effect(CalleeSource(), "call", [torch.autograd.graph.increment_version, [counted], {}])
        interpreter.effects.defer(lambda: [effect])
