"""Slices of symbolic sizes at plain bounds, without a guard on where they are cut off.

``x[-7:]`` of a symbolic size is 7 long, or as long as ``x`` where that is shorter. Torch's fake kernel decides for one of the
two and guards on it, so that each side is a graph; both are the same graph, with the size ``Min(7, x.shape[0])``. An operation
that reads that size later guards on it there, if it has to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import numbers as private_numbers
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.overrides import SYMBOLIC_FAKE, Run

_END = (1 << 63) - 1


@quirk(
    SYMBOLIC_FAKE,
    torch.ops.aten.slice.Tensor,
    example=lambda: Example(
        lambda x: x[-7:] * 2,
        [(torch.rand(size, 3),) for size in (12, 9, 7, 5, 3)],
        graphs=2,
        options={"fullgraph": True},
    ),
)
def clamped_slice(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Slice a symbolic size without a guard, where the bounds are plain numbers and the step is 1.

    A symbolic bound is compared with the size by nearly every program, so that nothing would be won; sizes that only the data
    decides, and bounds of bounds and of remainders, take torch longer to compare than another graph would.
    """
    tensor, dim, start, end, step = _bound(*args, **kwargs)
    if tensor.layout != torch.strided or tensor.dim() == 0 or any(map(private_sizes.is_symbolic, (start, end, step))):
        return NotImplemented
    position = dim % tensor.dim()
    size = tensor.shape[position]
    if step != 1 or not private_sizes.is_symbolic(size) or (not start and (end is None or end >= _END)):
        return NotImplemented
    if private_sizes.is_data_number(size) or not private_numbers.is_polynomial(size):
        return NotImplemented
    first = _clamped(start or 0, size)
    offset = tensor.storage_offset() + first * tensor.stride(position)
    sizes = list(tensor.shape)
    sizes[position] = _length(start or 0, None if end is None or end >= _END else end, size)
    with private_calls.no_torch_function():
        return torch.ops.aten.as_strided.default(tensor, sizes, list(tensor.stride()), offset)


def _bound(
    self: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> tuple[torch.Tensor, int, Any, Any, Any]:
    return self, dim, start, end, step


def _clamped(bound: int, size: Any) -> Any:
    """A bound of a slice, counted from the front and between 0 and the size."""
    return private_numbers.greater(bound + size, 0) if bound < 0 else private_numbers.lesser(bound, size)


def _length(start: int, end: int | None, size: Any) -> Any:
    """The length of a slice in as short an expression as can be: a comparison with 0 or 1 then need not guard."""
    if end is None:
        return private_numbers.lesser(-start, size) if start < 0 else private_numbers.greater(size - start, 0)
    if (start < 0) == (end < 0):
        return _clamped(end, size) - _clamped(start, size) if start < end else 0
    return private_numbers.greater(_clamped(end, size) - _clamped(start, size), 0)
