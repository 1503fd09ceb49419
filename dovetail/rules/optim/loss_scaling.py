"""``torch.amp.GradScaler`` in the graph of a step: a step whose gradients are not finite is eager's.

The scaler reads back whether a gradient was infinite, and leaves the optimizer's step out if so. That is rare once the scale
has settled. So the graph takes the step, and checks that the gradients are finite before anything is written; where they are
not, the call runs eagerly, with the random state that it began with.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.rules.torch.branches_on_data import assert_in_graph, may_assert
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import libraries as private_libraries
from dovetail.trace import CaptureSettings, Retry


@rule(private_libraries.scaled_optimizer_step)
def _step_if_finite(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _, optimizer, state, *rest = args
    trace = interpreter.trace
    if not may_assert(interpreter):
        raise Break("GradScaler reads back whether a gradient is infinite", "call its step() outside of the function")
    if trace.settings.shapes.data_sizes == "ask":
        raise Retry("GradScaler reads back whether a gradient is infinite", change=CaptureSettings.with_data_sizes)
    found = interpreter.drain(interpreter.load_item(state, "found_inf_per_device").values())
    with private_calls.no_torch_function(), torch.no_grad():
        is_finite = functools.reduce(torch.logical_and, [item.detach().to("cpu") == 0 for item in found])
    assert_in_graph(is_finite, "the gradients that GradScaler has looked at are finite")
    return interpreter.call(interpreter.load_attribute(optimizer, "step"), tuple(rest), kwargs)
