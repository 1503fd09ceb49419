"""Kinds of steps of a captured backward: those with an effect, and those that call the user's code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.backward_capture import accumulation, functions, hooks


def check_for_nan(name: str, positions: Sequence[int], outputs: Sequence[Any]) -> None:
    """Raise eager's error of anomaly mode if a node's gradients have a NaN."""
    for position, output in zip(positions, outputs, strict=True):
        if output is None:
            continue
        with torch.no_grad():
            values = output if output.layout is torch.strided else output.coalesce().values()
            is_nan = bool(torch.isnan(values).any())
        if is_nan:
            raise RuntimeError(f"Function '{name}' returned nan values in its {position}th output.")


#: Steps that call the user's code, or write to something that the user can see; they keep their order.
EFFECTS = frozenset(
    {
        accumulation.accumulate_grad,
        functions.call_backward,
        functions.compiled_prologue,
        hooks.call_tensor_hook,
        hooks.call_native_tensor_hooks,
        hooks.call_node_pre_hook,
        hooks.call_node_post_hook,
        hooks.call_post_accumulate_hook,
        hooks.unpack_saved,
        check_for_nan,
    }
)
#: Those among them that call the user's own code.
USER_CODE = EFFECTS - {accumulation.accumulate_grad, check_for_nan}
