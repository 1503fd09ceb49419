"""Origins of an input: other tensors, given by the caller, whose writes count as writes to it.

An input that stands for another tensor (an inner tensor of a subclass, the handle of a sparse one) has its own version counter.
Its origins are noted on it, each with its version; the backward compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Origin = tuple[torch.Tensor, int, Sequence[int]]
_ORIGINS = "_dovetail_origins"


def note_origin(tensor: torch.Tensor, origin: torch.Tensor) -> None:
    """Note that ``tensor`` stands for ``origin``, and for the origins of that."""
    setattr(tensor, _ORIGINS, [(origin, origin._version, ()), *origins_of(origin)])


def origins_of(tensor: torch.Tensor) -> list[Origin]:
    """The origins of a tensor, each with its version when it was noted, and the outputs whose backward reads it (none: any)."""
    return list(getattr(tensor, _ORIGINS, ()))


def check_unchanged(noted: Iterable[Origin], defined: Sequence[bool] = ()) -> None:
    """Raise eager's error if an origin has been written to that a backward from the ``defined`` outputs reads."""
    for origin, version, outputs in noted:
        if origin._version != version and (not outputs or any(defined[index] for index in outputs)):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {type(origin).__name__} is at version {origin._version}; expected version {version} instead"
            )
