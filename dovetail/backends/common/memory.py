"""The memory of tensors: where it lies, how far it reaches, and copies that keep its layout."""

from __future__ import annotations

from typing import Any

import torch


def storage_address(value: torch.Tensor) -> int:
    """Return the address of the tensor's storage; 0 for a tensor without memory."""
    return value.untyped_storage().data_ptr()


def span(value: torch.Tensor) -> int:
    """Return how many elements of memory lie between the tensor's first and its last, both included."""
    if value.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """Return the memory from the tensor's first element to its last, as a flat tensor.

    >>> memory_of(torch.arange(6).reshape(2, 3).t()[1:]).tolist()
    [1, 2, 3, 4, 5]
    """
    return value.detach().as_strided((span(value),), (1,), value.storage_offset())


def is_dense(value: torch.Tensor) -> bool:
    """Return whether the tensor's elements fill a stretch of memory without gaps and overlaps."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(value))


def copy_of(value: Any) -> Any:
    """Return a copy in memory of its own, with the strides of the value; lists and tuples are copied as well."""
    if type(value) in (tuple, list):
        return type(value)(map(copy_of, value))
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or not value.numel():
        return value.detach().clone()
    return memory_of(value).clone().as_strided(value.shape, value.stride())
