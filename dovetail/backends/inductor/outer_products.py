"""Decompositions of products over a single column into products of elements, which Inductor fuses with what reads them.

The gradient of a layer with one output is such a product, of the incoming gradient's column with the weights' row. As a matrix
product it is a call of its own, with memory for its result. Inductor itself takes it apart on a GPU, and on a CPU for 32 numbers at
most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., Any]
_aten = torch.ops.aten


def outer_products(table: Mapping[Any, Rule]) -> dict[Any, Rule]:
    """Return the decompositions by operator; whatever they leave alone goes to those of ``table``.

    >>> rules = outer_products({})
    >>> rules[torch.ops.aten.mm.default](torch.tensor([[2.0], [3.0]]), torch.tensor([[5.0, 7.0]]))
    tensor([[10., 14.],
            [15., 21.]])
    >>> rules[torch.ops.aten.mm.default](torch.ones(2, 2), torch.ones(2, 2))
    NotImplemented
    """
    product, sum_with_product = table.get(_aten.mm.default, _not_here), table.get(_aten.addmm.default, _not_here)

    def mm(one: Tensor, other: Tensor) -> Any:
        return one * other if _is_outer(one) else product(one, other)

    def addmm(start: Tensor, one: Tensor, other: Tensor, **factors: Any) -> Any:
        # The library rounds a sum in half precision once.
        exact = one.dtype in (torch.float32, torch.float64)
        return (
            start + one * other
            if exact and not factors and _is_outer(one)
            else sum_with_product(start, one, other, **factors)
        )

    return {_aten.mm.default: mm, _aten.addmm.default: addmm}


def _is_outer(one: Tensor) -> bool:
    """Whether a matrix has a single column in every call."""
    return one.device.type == "cpu" and type(one.shape[1]) is int and one.shape[1] == 1


def _not_here(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented
