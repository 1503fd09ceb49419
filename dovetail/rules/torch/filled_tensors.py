"""Numbers that a tensor cannot hold: fake tensors take any, and a tensor that nobody reads is not filled when the graph runs."""

from __future__ import annotations

import math
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule


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
    """Traced, torch compares with the numbers of the classes, and keeps strides that eager's kernel does not keep."""
    return interpreter.native(function, args, kwargs).contiguous()
