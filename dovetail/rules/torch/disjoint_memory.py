"""Tensors that share memory and no element of it, such as the halves of a buffer: a graph may write to each of them.

Not where gradients are recorded: the parts of one tensor have one history, and a write to one part changes that of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.guards.generator import DISJOINT

#: Offsets between elements, from the largest step to the smallest: the step, and how often it may be taken, at least and at most.
Steps = Sequence[tuple[int, int, int]]


def are_disjoint(tensors: Sequence[torch.Tensor], index: int) -> bool:
    """Whether no other tensor has an element in common with the one at ``index``."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return not any(_meet(tensors[index], other) for position, other in enumerate(tensors) if position != index)


DISJOINT.append(are_disjoint)


def _meet(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors may have an element in common.

    >>> x = torch.zeros(4, 6)
    >>> _meet(x[:, :3], x[:, 3:]), _meet(x[:, :4], x[:, 3:]), _meet(x[::2], x[1::2]), _meet(x[0], x[:, 0])
    (False, True, False, True)
    """
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return True
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr() or not left.numel() or not right.numel():
        return False
    (first, last), (start, end) = _range(left), _range(right)
    if last <= start or end <= first:
        return False
    if left.stride() != right.stride() or left.dtype != right.dtype:
        return True
    sizes = zip(left.stride(), left.shape, right.shape, strict=True)
    steps = sorted(((step, 1 - other, size - 1) for step, size, other in sizes if step), reverse=True)
    return _reach(int(right.storage_offset() - left.storage_offset()), steps)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies."""
    first, width = int(tensor.storage_offset()), tensor.element_size()
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * width, (last + 1) * width


def _reach(distance: int, steps: Steps) -> bool:
    """Whether steps come to exactly this distance."""
    if not steps:
        return distance == 0
    (step, least, most), *rest = steps
    below, above = (sum(item[0] * item[side] for item in rest) for side in (1, 2))
    counts = range(max(least, -((above - distance) // step)), min(most, (distance - below) // step) + 1)
    return any(_reach(distance - count * step, rest) for count in counts)
