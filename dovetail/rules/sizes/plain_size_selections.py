"""Selections and splits whose C++ asks for plain sizes, as the operators that they are made of."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.rules.sizes.plain_size_formulas import Call, formula
from dovetail.trace.trace import open_trace

_aten = torch.ops.aten


class _Selected(torch.autograd.Function):
    """``masked_select`` of tensors of one size, with its own derivative in operators that take symbolic sizes."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See :class:`torch.autograd.Function`."""
        ctx.save_for_backward(input, mask)
        return torch.masked_select(input, mask)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        """See :class:`torch.autograd.Function`."""
        input, mask = ctx.saved_tensors
        return torch.masked_scatter(torch.zeros_like(input), mask, tangents[0]), None


def masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``torch.masked_select`` of tensors of one size, so also where a program is traced again."""
    if open_trace() is None:
        return torch.masked_select(input, mask)
    found: torch.Tensor = _Selected.apply(input, mask)  # type: ignore[no-untyped-call]
    return found


@formula(torch.masked_select)
def _masked_select(call: Call, input: torch.Tensor, mask: torch.Tensor) -> Any:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return None
    if not (input.requires_grad and torch.is_grad_enabled()):
        return None
    return call.record(masked_select, *call(torch.broadcast_tensors, input, mask))


@formula(torch.take_along_dim)
def _take_along_dim(call: Call, input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> Any:
    if not isinstance(indices, torch.Tensor) or indices.dtype != torch.int64:
        return None
    if dim is None:
        flat = [call(torch.Tensor.reshape, item, [-1]) for item in (input, indices)]
        return call(torch.gather, flat[0], 0, flat[1])
    rank = input.dim()
    if not rank or indices.dim() != rank or type(dim) is not int or not -rank <= dim < rank:
        return None
    dim %= rank
    sizes: list[Any] = []
    for at, (one, other) in enumerate(zip(input.shape, indices.shape, strict=True)):
        if at != dim and one != other and one != 1 and other != 1:
            return None
        sizes.append(-1 if at == dim else other if one == 1 else one)
    wide = [call(torch.Tensor.expand, item, sizes) for item in (input, indices)]
    return call(torch.gather, wide[0], dim, wide[1])


@formula(torch.tensor_split)
def _tensor_split(call: Call, input: torch.Tensor, sections: Any, dim: int = 0) -> Any:
    rank = input.dim()
    if not rank or type(dim) is not int or not -rank <= dim < rank:
        return None
    if type(sections) in (tuple, list) and all(type(item) is int for item in sections):
        ends = zip([0, *sections], [*sections, None], strict=True)
        return tuple(call(_aten.slice.Tensor, input, dim, start, end) for start, end in ends)
    if type(sections) is not int or sections <= 0:
        return None
    start: Any = 0
    parts = []
    for at in range(sections):
        # The rest goes to the first parts, one each.
        count = (input.shape[dim] - at + sections - 1) // sections
        parts.append(call(torch.narrow, input, dim, start, count))
        start = start + count
    return tuple(parts)


@formula(torch.sgn)
def _sgn(call: Call, input: torch.Tensor) -> Any:
    # The same numbers; the gradient of the one are zeros without memory, which have a plain size.
    return None if input.is_complex() else call(torch.sign, input)
