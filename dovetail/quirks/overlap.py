"""Writes to memory that is read, or written twice, by the same operator: eager refuses them, functional graphs do not notice.

The rules are those of torch's ``aten/src/ATen/MemoryOverlap.cpp``: a written tensor must not have elements that share memory,
and an operand that shares memory with it must lie exactly where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing


class OverlapError(CaptureError):
    """An operator writes to memory that overlaps with itself or with what the operator reads."""


def check_overlap(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Raise :class:`OverlapError` where eager may refuse the call because of overlapping memory."""
    schema = operator._schema
    if not schema.is_mutable:
        return
    if schema.name == "aten::set_":
        raise OverlapError("set_ makes a tensor lie in the memory of another one", advice="use copy_")
    given: list[tuple[Any, bool]] = []
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else (kwargs or {}).get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        items = value if isinstance(value, (list, tuple)) else (value,)
        given += [(item, written) for item in items if isinstance(item, torch.Tensor) and item.layout is torch.strided]
    for at, (target, written) in enumerate(given):
        if not written:
            continue
        if any(
            type(step) is int and step == 0 and size != 1
            for size, step in zip(target.shape, target.stride(), strict=True)
        ):
            raise OverlapError(
                f"{operator} writes to a tensor of which several elements share one place in memory",
                advice="clone it first",
            )
        storage = target.untyped_storage()._cdata
        for other_at, (other, _) in enumerate(given):
            if (
                other_at != at
                and other is not target
                and other.untyped_storage()._cdata == storage
                and _partly(target, other)
            ):
                raise OverlapError(
                    f"{operator} writes to memory that it also reads, at another place",
                    advice="clone the operand first",
                )


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a real tensor may share one place in memory.

    >>> may_overlap_itself(torch.ones(3, 1).expand(3, 4)), may_overlap_itself(torch.ones(3, 4).t()[:, ::2])
    (True, False)
    """
    if tensor.numel() < 2:
        return False
    reach = 0
    for step, size in sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


_LARGEST_MAP = 1 << 24
"""Elements; above it two tensors whose ranges of memory overlap are taken to overlap."""


def _are_disjoint(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether no element of one tensor is an element of the other, as with the borders of a padded tensor."""
    numbers = [(tuple(item.shape), item.stride(), item.storage_offset()) for item in (left, right)]
    if any(type(number) is not int for shape, stride, offset in numbers for number in (*shape, *stride, offset)):
        return _are_apart(left, right)
    first = min(offset for _, _, offset in numbers)
    ends = [
        offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        for shape, stride, offset in numbers
    ]
    if max(ends) - first >= _LARGEST_MAP:
        return False
    with private_tracing.disable_current_modes():
        taken = torch.zeros(max(ends) - first + 1, dtype=torch.bool)
        one, other = (taken.as_strided(shape, stride, offset - first) for shape, stride, offset in numbers)
        one.fill_(True)
        return not bool(other.any())


def _are_apart(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two boxes of one tensor with symbolic sizes have a dimension in which they lie apart.

    Offsets are taken apart into coordinates, as the digits of a number. That is unique where each stride reaches at least
    over all that lies within it. Every comparison becomes a guard.
    """
    strides = left.stride()
    if strides != right.stride() or any(private_sizes.is_data_number(size) for size in (*left.shape, *right.shape)):
        return False
    low, high = (left, right) if left.storage_offset() <= right.storage_offset() else (right, left)
    distance = high.storage_offset() - low.storage_offset()
    room: Any = None
    apart = False
    for dim, step in enumerate(strides):
        shift = distance // step if distance >= step else 0
        distance = distance - shift * step
        if low.shape[dim] >= shift + high.shape[dim]:
            extent = low.shape[dim]
        else:
            extent = shift + high.shape[dim]
        if step <= 0 or (room is not None and extent * step > room):
            return False
        apart = apart or bool(shift >= low.shape[dim])
        room = step
    return apart and bool(distance == 0)


def _partly(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one storage share some of their memory but do not lie in the same way."""
    if left.numel() == 0 or right.numel() == 0:
        return False
    if left.dtype == right.dtype and left.storage_offset() == right.storage_offset() and left.shape == right.shape:
        return left.stride() != right.stride()
    if left.dtype == right.dtype and _are_disjoint(left, right):
        return False
    spans = []
    for tensor in (left, right):
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        spans.append((start, start + (reach + 1) * tensor.element_size()))
    return bool(spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1])
