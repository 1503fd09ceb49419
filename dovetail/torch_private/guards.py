"""Guards in C++ that the core uses: checks of many tensors at once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def bulk_tensor_check(
    tensors: list[torch.Tensor], sizes: list[list[int | None]], strides: list[list[int | None]]
) -> Callable[..., bool]:
    """A C++ ``check(*tensors)``: the tensors have the same type, keys, dtype, device and requires_grad, and the given sizes
    and strides (None: any).

    Only for dense tensors: the constructor crashes on sparse ones. It refuses a tensor that comes twice among tensors
    that were distinct, see :func:`bulk_check_sees_duplicates`.
    """
    guard = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=sizes,  # type: ignore[misc, arg-type]
        dynamic_dims_strides=strides,  # type: ignore[misc, arg-type]
    )
    return guard.check


@functools.cache
def bulk_check_sees_duplicates() -> bool:
    """Whether this torch's bulk check refuses one tensor in two places (true on 2.13)."""
    first, second = torch.zeros(1), torch.zeros(1)
    check = bulk_tensor_check([first, second], [[1], [1]], [[1], [1]])
    return check(first, second) and not check(first, first)
