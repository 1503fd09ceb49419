"""Non-contiguous gradients: gradients with gaps in memory, as that of a real tensor that is used as a complex one.

A gradient that is differentiated again comes back in parts, and autograd's sum of two such parts is dense, where eager has one
part and its strides. A node between the input and the graph gives the sum those strides, where both parts have them: in eager they
are then handed on by one operator, whose gradient is computed once, from a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.torch_private import sizes as private_sizes

Strides = dict[int, tuple[int, ...]]
"""The strides of non-contiguous gradients, by the index of their input."""


def gap_strides(gradients: Sequence[torch.Tensor | None]) -> Strides:
    """The strides of those gradients that have gaps in memory."""
    return {
        index: gradient.stride()
        for index, gradient in enumerate(gradients)
        if gradient is not None
        and gradient.layout is torch.strided
        and not private_sizes.has_symbols(gradient)
        and _has_gaps(gradient)
    }


def _has_gaps(value: torch.Tensor) -> bool:
    expected = 1
    found = False
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride < expected:
                return False
            found = found or stride > expected
            expected = stride * size
    return found and value.numel() > 0


class _WithGaps(torch.autograd.Function):
    """The same tensor; its gradient has these strides."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, strides: Mapping[int, tuple[int, ...]], index: int) -> torch.Tensor:
        ctx.strides, ctx.index = strides, index
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # Looked up now: the second derivative may have been captured since, and say that its part has other ones.
        strides = ctx.strides.get(ctx.index)
        if strides is None or gradient.layout is not torch.strided or gradient.stride() == strides:
            return gradient, None, None
        target = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
        return target.copy_(gradient), None, None


def keep_gaps(inputs: list[torch.Tensor], strides: Strides) -> None:
    """Put such a node in front of the inputs that have such a gradient."""
    for index in tuple(strides):
        if inputs[index].requires_grad:
            with torch.enable_grad():
                inputs[index] = _WithGaps.apply(inputs[index], strides, index)  # type: ignore[no-untyped-call]


def keep_common(strides: Strides, indices: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
    """Forget the strides of inputs whose second derivative, the gradients of these ``indices``, has other ones."""
    found = gap_strides(gradients)
    for position, (index, gradient) in enumerate(zip(indices, gradients, strict=True)):
        if gradient is not None and found.get(position) != strides.get(index):
            strides.pop(index, None)
