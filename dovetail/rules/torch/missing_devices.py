"""A tensor is made on a device that this process has not got: the graph breaks, and eager raises its error.

Fake kernels take every device; autograd then ends the process where it makes the node of such a tensor (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.trace.overrides import EVERY, RefusedOperatorError, Run

_EVERYWHERE = ("cpu", "meta")


def _is_here(kind: str) -> bool:
    """Whether tensors can be made on this kind of device, by torch's module for it."""
    module = getattr(torch, kind, None)
    return module is not None and bool(getattr(module, "is_available", lambda: True)())


def _device_exists(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    device = kwargs.get("device")
    kind = "cpu" if device is None else torch.device(device).type
    if kind not in _EVERYWHERE and not _is_here(kind):
        raise RefusedOperatorError(f"this process has no {kind} device", advice="make the tensor on another device")
    return NotImplemented


# In front of what records an operator as it was recorded before, whichever of the two was loaded first.
EVERY.insert(0, _device_exists)
