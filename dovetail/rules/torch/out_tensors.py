"""``out=``: the result is computed as without it and copied, so that the given tensor keeps its strides and its memory.

Functionalisation puts the result in the place of the given tensor: with the strides of the result, with the memory of an operand
where the result is the operand (``torch.conj_physical`` of real numbers), and not at all for functions that are composed of others
while a dispatch mode is active (``torch.linalg.matrix_rank``, ``torch.chain_matmul``).
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, keyword_rule
from dovetail.quirks.functionalisation import SAME_DTYPE, is_aligned, new_strides, strides_of
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace.repeats import draws_random_numbers


def _fits(out: torch.Tensor, result: Any) -> bool:
    """Whether eager would write ``result`` to ``out`` as it is, or to memory of the result's layout that it adds."""
    return out.shape == result.shape or (out.numel() == 0 and strides_of(result) == new_strides(result.shape))


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.layout


def _is_special(function: Any, operands: list[torch.Tensor], outs: list[torch.Tensor]) -> bool:
    """Whether eager refuses the call, reads what it writes, or draws random numbers in the order of the memory."""
    if torch.is_grad_enabled() and any(item.requires_grad for item in (*operands, *outs)):
        return True
    if any(item.layout is not torch.strided for item in (*operands, *outs)):
        return True
    written = {out.untyped_storage()._cdata for out in outs}
    if any(item.untyped_storage()._cdata in written for item in operands):
        return True
    packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    return packet is not None and any(draws_random_numbers(getattr(packet, name)) for name in packet.overloads())


@keyword_rule("out")
def _out(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    given = kwargs["out"]
    outs = [given] if isinstance(given, torch.Tensor) else list(given or ())
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    operands = [item for item in private_trees.tree_leaves((args, rest)) if isinstance(item, torch.Tensor)]
    if not outs or not all(isinstance(out, torch.Tensor) for out in outs) or _is_special(function, operands, outs):
        return NotImplemented
    if not all(map(private_tracing.is_tracing_mode, private_state.dispatch_modes())):
        raise Break(f"out= of {function.__name__} under a mode that sees each call", "copy the result to it")
    # Errors are those of the call with ``out=``. Nobody reads the tensors written here: they leave the graph as dead code.
    with interpreter.trace.recorder.paused():
        trial = [out.clone() for out in outs]
        with_trial = {**rest, "out": trial[0] if isinstance(given, torch.Tensor) else tuple(trial)}
        returned = interpreter.native(function, args, with_trial)
    recorded = len(interpreter.trace.graph.nodes)
    try:
        results = interpreter.native(function, args, rest)
    except TypeError:
        # A function that has no other form.
        return NotImplemented
    values = [results] if isinstance(results, torch.Tensor) else list(results)
    if len(values) != len(outs) or any(_kind(out) != _kind(value) for out, value in zip(outs, values, strict=True)):
        raise Break(f"out= of {function.__name__} is of another type than its result", "copy the result to it")
    if not all(strides_of(out) == new_strides(out.shape) for out in outs):
        # Kernels round in another way where they write with gaps, and may give a tensor other strides.
        raise Break(f"out= of {function.__name__} is not contiguous", "copy the result to it")
    made = {node.target for node in islice(interpreter.trace.graph.nodes, recorded, None)}
    if interpreter.trace.settings.exact and not made.isdisjoint(SAME_DTYPE) and not all(map(is_aligned, outs)):
        raise Break(f"out= of {function.__name__} is at an odd address", "copy the result to it")
    if not all(map(_fits, outs, values)):
        raise Break(f"out= of {function.__name__} is given another shape", "make it of the result's shape")
    for out, value in zip(outs, values, strict=True):
        if out.shape != value.shape:
            out.resize_(value.shape)
        out.copy_(value)
    if returned is None or isinstance(given, torch.Tensor):
        return None if returned is None else given
    return tuple(outs) if type(returned) is tuple else type(returned)(outs)
