"""Whole-number tensors whose value is a formula over the sizes of the inputs, read off the graph that computes them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.trace import Trace

_aten = torch.ops.aten
# The first argument is the tensor; what they may be given beside it (a memory format, a dtype) is looked at below.
_SAME = {
    _aten.clone.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.lift_fresh_copy.default,
    _aten._to_copy.default,
}
_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: operator.add,
    _aten.add.Scalar: operator.add,
    _aten.sub.Tensor: operator.sub,
    _aten.sub.Scalar: operator.sub,
    _aten.rsub.Scalar: lambda first, second: second - first,
    _aten.mul.Tensor: operator.mul,
    _aten.mul.Scalar: operator.mul,
    _aten.neg.default: operator.neg,
}
# Tensors wrap around at 64 bits and Python's numbers do not. These operators agree on the last 64 bits whatever
# happened on the way, so that it is enough to look at the result.
_LIMIT = 1 << 62


def known_number(trace: Trace, value: torch.Tensor) -> Any:
    """The number in a traced int64 tensor without dimensions that was computed of sizes and numbers alone; None for all
    other tensors.
    """
    if value.dim() or value.dtype != torch.int64 or value.requires_grad:
        return None
    number = _evaluate(trace.node_of(value))
    if number is None or private_sizes.is_data_number(number):
        return None
    return number if -_LIMIT < number < _LIMIT else None


def _evaluate(item: Any) -> Any:
    if type(item) is int:
        return item
    if not isinstance(item, torch.fx.Node):
        return None
    example = item.meta.get("val")
    if isinstance(example, torch.SymInt):
        return example
    if not isinstance(example, torch.Tensor) or example.dim() or example.dtype != torch.int64:
        return None
    if item.target is _aten.scalar_tensor.default or item.target in _SAME:
        return _evaluate(item.args[0])
    compute = _OPERATORS.get(item.target)
    if compute is None or item.kwargs:
        # ``alpha`` of an addition is given by keyword.
        return None
    numbers = [_evaluate(argument) for argument in item.args]
    return None if any(number is None for number in numbers) else compute(*numbers)
