"""``torch.compiler.is_compiling()``: one answer for a compiled function.

A function may run in parts: captured, eagerly at a graph break, eagerly beyond the recompile limit. A program that keeps state by
the answer needs the same one everywhere, and eager's results need eager's answer, which is no. Where the whole function has to be
one graph (``fullgraph=True``) and cannot be with this answer, the function is captured again with yes, the branch for compilers.
Libraries that only choose between algorithms by it are told yes while they are captured, which spares graph breaks.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Frame
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.torch_private import dynamo as private_dynamo
from dovetail.trace.settings import SAYS_COMPILING, SAYS_EAGER

#: They keep nothing by the answer that a later call computes with.
_CHOOSES_ALGORITHMS = frozenset(
    {"torch", "transformers", "torch_geometric", "diffusers", "accelerate", "peft", "tensordict", "torchrl"}
)


def _is_trained(encoder: Any) -> bool:
    """Whether a ``TransformerEncoder`` leaves sequences as they are even in evaluation, because gradients are asked for."""
    return torch.is_grad_enabled() and any(item.requires_grad for item in encoder.layers[0].parameters())


def _has_hooks_for_errors(frame: Frame) -> bool:
    """Whether a module's call runs hooks where its ``forward`` raises (``always_call=True``), which it leaves out for compilers."""
    module = frame.cells["self"].cell_contents if "self" in frame.cells else frame.locals.get("self")
    everywhere = frame.globals.get("_global_forward_hooks_always_called")
    return bool(everywhere or getattr(module, "_forward_hooks_always_called", None))


@rule(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, *private_dynamo.compiling_questions())
def _is_compiling(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # A library's own function of such a name hands the question on.
    asking = (frame for frame in reversed(interpreter.frames) if not frame.code.co_name.startswith("is_"))
    frame = next(asking, None)
    module = "" if frame is None else str(frame.globals.get("__name__"))
    if module.startswith("torch.optim."):
        # It would keep numbers on tensors that eager computes in Python, and round differently.
        return False
    if frame is not None and module == "torch.nn.modules.transformer" and not _is_trained(frame.locals.get("self")):
        # It would not pack padded sequences, and give other numbers than zeros for the padding.
        return False
    if frame is not None and module == "torch.nn.modules.module" and _has_hooks_for_errors(frame):
        return False
    trace = interpreter.trace
    is_told = module.split(".", 1)[0] in _CHOOSES_ALGORITHMS or not trace.settings.allows(SAYS_EAGER)
    answer = is_told and trace.settings.allows(SAYS_COMPILING)
    trace.findings.told_compiling.add(answer)
    return answer
