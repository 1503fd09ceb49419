"""Numbers that a tensor cannot hold: fake tensors take any, and a tensor that nobody reads is not filled when the graph runs."""

from __future__ import annotations

import math
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule
from dovetail.rules.torch.branches_on_data import assert_in_graph
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace.settings import RECOMPUTES


@method_rule(*("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "pad"))
def _fill(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    numbers = [abs(item) for item in (*args, *kwargs.values()) if type(item) is float and abs(item) < math.inf]
    if not numbers:
        return NotImplemented
    result = interpreter.native(function, args, kwargs)
    is_float = isinstance(result, torch.Tensor) and result.dtype.is_floating_point
    if is_float and max(numbers) > torch.finfo(result.dtype).max:
        raise Break(
            f"a tensor of {result.dtype} is filled with a number that it cannot hold",
            "use a number that fits, or a tensor of float64",
        )
    return result


@method_rule("one_hot")
def _one_hot(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Traced, torch compares with the numbers of the classes: without eager's check of them, and with strides of its own."""
    given = (*args, *kwargs.values())
    indices = next((item for item in given if isinstance(item, torch.Tensor)), None)
    classes = next((item for item in given if isinstance(item, (int, torch.SymInt))), -1)
    # Eager checks on the CPU only, so that nobody waits for a GPU, and not under vmap. A program that is replayed checks by itself.
    is_asked = classes != -1 and interpreter.trace.settings.allows(RECOMPUTES)
    if is_asked and indices is not None and indices.is_cpu and not private_tensors.is_functorch_wrapped(indices):
        known: Any = indices
        above, below = (known >= 0).all(), (known < classes).all()
        if interpreter.trace.phase != "forward" or interpreter.values.in_backward:
            # Eager raises in the backward too.
            with private_calls.no_torch_function(), torch.no_grad():
                torch.ops.aten._assert_async.msg(above, "Class values must be non-negative.")
                torch.ops.aten._assert_async.msg(below, "Class values must be smaller than num_classes.")
        else:
            assert_in_graph(above & below, "the classes of one_hot are in their range")
    return interpreter.native(function, args, kwargs).contiguous()
