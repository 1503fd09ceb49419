"""Origins of an input: other tensors, given by the caller, whose writes count as writes to it.

An input that stands for another tensor (an inner tensor of a subclass, the handle of a sparse one) has a version counter of its own,
so that saving it for a backward would not notice a write to the tensor it stands for. Its origins are noted on it, each with its
version; the backward compares.

>>> outer, inner = torch.zeros(2), torch.zeros(2)
>>> note_origin(inner, outer)
>>> noted = origins_of(inner)
>>> check_unchanged(noted)
>>> outer = outer.add_(1)
>>> check_unchanged(noted)
Traceback (most recent call last):
    ...
RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: a Tensor is at version 1; expected version 0 instead
"""  # noqa: E501

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
