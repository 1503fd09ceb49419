"""Small parts of a loaded graph: its views and its result, made from data.

>>> build_result({"dict": [["loss", {"tensor": 0}], ["steps", 3]]}, ["a tensor"])
{'loss': 'a tensor', 'steps': 3}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import InputError


@dataclass(frozen=True)
class LoadedView:
    """Makes a view of a base again: same size, stride and offset."""

    plain: tuple[tuple[int, ...], tuple[int, ...], int]

    def __call__(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The view, of another base; raises :class:`InputError` where it would leave the base's memory."""
        size, stride, offset = self.plain
        offset += int(base.storage_offset())
        if offset < 0 or len(size) != len(stride):
            raise InputError("the view in the artefact lies outside of its base")
        return base.as_strided(size, stride, offset)


def build_result(data: Any, tensors: Sequence[Any]) -> Any:
    """A call's result from its description and the graph's tensors."""
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float.fromhex(content)
    if kind == "dict":
        return {key: build_result(item, tensors) for key, item in content}
    items = [build_result(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def highest_tensor(data: Any) -> int:
    """The highest number of a tensor in the description of a result; -1 for none. Raises ValueError for a bad number."""
    if not isinstance(data, dict):
        return -1
    ((kind, content),) = data.items()
    if kind == "tensor":
        return int(content)
    if kind == "float":
        float.fromhex(content)
        return -1
    parts = [part for pair in content for part in pair] if kind == "dict" else content
    if kind == "dict" and any(not isinstance(key, (str, int)) for key, _ in content):
        raise ValueError("a dictionary has a key that is no constant")
    return max([highest_tensor(part) for part in parts], default=-1)
