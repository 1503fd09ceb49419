"""Origins of an input: other tensors, given by the caller, whose writes count as writes to it.

An input that stands for another tensor (an inner tensor of a subclass, the handle of a sparse one) has its own version counter.
Its origins are noted on it, each with its version; the backward compares.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_ORIGINS = "_dovetail_origins"


def note_origin(tensor: torch.Tensor, origin: torch.Tensor) -> None:
    """Note that ``tensor`` stands for ``origin``, and for the origins of that."""
    setattr(tensor, _ORIGINS, [(origin, origin._version), *origins_of(origin)])


def origins_of(tensor: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """The origins of a tensor, each with its version when it was noted."""
    return list(getattr(tensor, _ORIGINS, ()))


def check_unchanged(noted: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Raise eager's error if an origin has been written to."""
    for origin, version in noted:
        if origin._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {type(origin).__name__} is at version {origin._version}; expected version {version} instead"
            )
