"""A tensor is made on a device that this process has not got: the graph breaks, and eager raises its error.

Fake kernels take every device; autograd then ends the process where it makes the node of such a tensor (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.trace.overrides import EVERY, RefusedOperatorError, Run

_here = {"cpu", "meta"}


def _is_here(kind: str) -> bool:
    """Whether tensors can be made on this kind of device, by torch's module for it."""
    module = getattr(torch, kind, None)
    return module is not None and bool(getattr(module, "is_available", lambda: True)())


@EVERY.append
def _device_exists(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    device = kwargs.get("device")
    if device is not None and (kind := torch.device(device).type) not in _here:
        if not _is_here(kind):
            raise RefusedOperatorError(f"this process has no {kind} device", advice="make the tensor on another device")
        _here.add(kind)
    return NotImplemented
