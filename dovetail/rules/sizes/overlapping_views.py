"""``as_strided`` with symbolic sizes, where places of the result share memory: windows that overlap.

The gradient of such a view adds up what each place of memory gets. torch's C++ numbers these places with plain sizes (torch
2.13), and so would hold the graph to those of today's call. Here the same operators number them with symbolic ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import method_rule, rule
from dovetail.rules.sizes.number_tensors import number_of
from dovetail.rules.sizes.recurrent_networks import record_call
from dovetail.rules.sizes.tensor_sizes import with_known_sizes
from dovetail.torch_private import sizes as private_sizes

Sizes = Sequence[Any]


def overlaps(sizes: Sizes, strides: Sizes) -> bool | None:
    """Whether places may share memory, by the rule of torch's own gradient; None where no place or a repeated one is there.

    >>> overlaps((3, 4), (4, 1)), overlaps((3, 4), (2, 1)), overlaps((3, 4), (0, 1))
    (False, True, None)
    """
    if any(size == 0 for size in sizes):
        return None
    steps = [(stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    if any(stride == 0 for stride, _ in steps):
        return None
    steps.sort(key=functools.cmp_to_key(_by_stride))
    reach: Any = 0
    for stride, size in steps:
        if stride <= reach:
            return True
        reach = reach + (size - 1) * stride
    return False


def _by_stride(left: Any, right: Any) -> int:
    return -1 if left[0] < right[0] else int(left[0] > right[0])


def _extent(sizes: Sizes, strides: Sizes) -> Any:
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


class _OverlappingView(torch.autograd.Function):
    """The view, with a gradient in operators that take symbolic sizes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: Sizes, stride: Sizes) -> torch.Tensor:
        """See :class:`torch.autograd.Function`."""
        ctx.geometry = tuple(tensor.shape), tuple(tensor.stride()), tuple(size), tuple(stride)
        return tensor.as_strided(size, stride)

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """See :class:`torch.autograd.Function`."""
        shape, strides, size, stride = ctx.geometry
        count = torch.sym_max(_extent(shape, strides), _extent(size, stride))
        places = torch.arange(count, device=tangent.device).as_strided(size, stride)
        memory = tangent.new_zeros(count).index_add(0, places.reshape(-1), tangent.reshape(-1))
        return memory.as_strided(shape, strides), None, None


def overlapping_view(tensor: torch.Tensor, size: Sizes, stride: Sizes) -> torch.Tensor:
    """``tensor.as_strided(size, stride)``; the tensor is one whose own places share no memory."""
    found: torch.Tensor = _OverlappingView.apply(tensor, size, stride)  # type: ignore[no-untyped-call]
    return found


def _viewed(interpreter: TracingInterpreter, tensor: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """The view; None where torch's own function is to make it."""
    if not (isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()):
        return None
    if storage_offset is not None or not all(type(item) in (list, tuple, torch.Size) for item in (size, stride)):
        return None
    size, stride = (
        [item if (number := number_of(interpreter, item)) is None else number for item in items]
        for items in (size, stride)
    )
    if not all(type(item) in (int, torch.SymInt) for item in (*size, *stride)):
        return None
    if not private_sizes.has_symbols(tensor) and not any(map(private_sizes.is_symbolic, (*size, *stride))):
        return None
    if any(map(private_sizes.is_data_number, (*size, *stride, *tensor.shape))):
        return None
    if len(size) != len(stride) or overlaps(tensor.shape, tensor.stride()) is not False or not overlaps(size, stride):
        return None
    return record_call(interpreter, overlapping_view, (tensor, tuple(size), tuple(stride)))  # type: ignore[arg-type]


@rule(torch.as_strided)
def _as_strided(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _viewed(interpreter, *args, **kwargs)
    return interpreter.call_torch(torch.as_strided, args, kwargs) if found is None else found


def _method(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    owner = getattr(function, "__self__", None)
    found = _viewed(interpreter, owner, *args, **kwargs) if isinstance(owner, torch.Tensor) else None
    return with_known_sizes(interpreter, function, args, kwargs) if found is None else found


method_rule("as_strided")(_method)
