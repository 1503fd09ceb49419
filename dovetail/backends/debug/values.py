"""Comparison of values, as far as a backend's promise goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.backends.protocol import Backend


def values_agree(found: torch.Tensor, wanted: torch.Tensor, backend: Backend) -> bool:
    """Return whether values agree as far as the backend promises: to the last bit, or within its tolerances.

    Half-precision numbers get the tolerance that their eight to eleven bits need, float64 one that float32 cannot meet.
    """
    if torch.equal(found, wanted):
        return True
    relative, absolute = backend.tolerances
    if backend.numerics == "bitwise" or not (wanted.is_floating_point() or wanted.is_complex()):
        relative = absolute = 0.0
    elif wanted.dtype in (torch.bfloat16, torch.float16):
        relative, absolute = max(relative, 2e-2), max(absolute, 1e-3)
    elif wanted.dtype in (torch.float64, torch.complex128):
        relative, absolute = min(relative, 1e-7), min(absolute, 1e-8)
    return torch.allclose(found, wanted, rtol=relative, atol=absolute, equal_nan=True)


def difference(
    found: Any, wanted: Any, backend: Backend, properties: Sequence[str] = ("dtype", "shape", "device")
) -> str:
    """Say in words how one value differs, in these properties of a tensor or in its numbers; empty if it does not.

    >>> from dovetail.backends import ATEN
    >>> difference(torch.ones(2), torch.tensor([1.0, 3.0]), ATEN)
    'differs by up to 2: 1.0 instead of 3.0'
    """
    if not isinstance(wanted, torch.Tensor):
        return "" if found == wanted or found != found else f"is {found!r} instead of {wanted!r}"
    if not isinstance(found, torch.Tensor):
        return f"is of type {type(found).__name__} instead of a tensor"
    for name in properties:
        one, other = getattr(found, name), getattr(wanted, name)
        if one != other:
            return f"has {name} {one} instead of {other}"
    found, wanted = found.detach(), wanted.detach()
    if values_agree(found, wanted, backend):
        return ""
    distance = (found.to(torch.float64) - wanted.to(torch.float64)).abs().nan_to_num(float("inf"))
    place = int(distance.flatten().argmax())
    one, other = found.flatten()[place].item(), wanted.flatten()[place].item()
    return f"differs by up to {distance.max().item():.3g}: {one!r} instead of {other!r}"


def used_gpus() -> range:
    """Return the devices whose random generators may have been used."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
