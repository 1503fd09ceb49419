"""Functions that torch computes by another kernel while they are traced, with other strides or another rounding."""

from __future__ import annotations

import operator
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule, native_rule
from dovetail.quirks.functionalisation import new_strides, strides_of
from dovetail.torch_private import state as private_state
from dovetail.versions import parse


@method_rule("max_pool1d")
def _pool(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Without gradients, eager has a kernel of its own that gives a contiguous result."""
    result = interpreter.native(function, args, kwargs)
    if not isinstance(result, torch.Tensor) or result.requires_grad or strides_of(result) == new_strides(result.shape):
        return result
    return interpreter.call_torch(torch.clone, (result,), {"memory_format": torch.contiguous_format})


@method_rule("masked_fill_")
def _fill_view(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """With a value that has a gradient: a write to a view has a node of its own, which hides the formula of this one."""
    owner = getattr(function, "__self__", None)
    target, *rest = (owner, *args) if isinstance(owner, torch.Tensor) else args
    value = kwargs.get("value", rest[-1] if rest else None)
    if not isinstance(value, torch.Tensor) or not value.requires_grad or not target._is_view():
        return NotImplemented
    filled = interpreter.call_torch(torch.Tensor.masked_fill, (target, *rest), kwargs)
    return interpreter.call_torch(torch.Tensor.copy_, (target, filled), {})


@method_rule("bilinear", "linalg_pinv", "pinverse")
def _cast_inside(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """The kernel calls operators that autocast casts, below the tracer, which would record one operator without casts."""
    if private_state.is_any_autocast_on():
        raise Break(f"the kernel of {function.__name__} casts under autocast", "leave autocast for it")
    return NotImplemented


@method_rule("matmul", "linalg_matmul", "__matmul__", "__rmatmul__")
def _product(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    owner = getattr(function, "__self__", None)
    operands = (owner, *args) if isinstance(owner, torch.Tensor) else args
    if getattr(function, "__name__", "") == "__rmatmul__":
        operands = operands[::-1]
    if not _is_in_batches(interpreter, operands, kwargs):
        return NotImplemented
    return interpreter.native(torch.bmm, _in_batches(*operands), {})


@method_rule("scaled_dot_product_attention")
def _attention(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Made of two such products, where the keys or the values are the same for the whole batch. Torch 2.15 has a kernel for it."""
    if (
        len(args) < 3
        or parse(torch.__version__) >= (2, 15)
        or not any(_is_in_batches(interpreter, (args[0], item), {}) for item in args[1:3])
    ):
        return NotImplemented
    query, *rest = args
    for place, item in enumerate(rest[:2]):
        if _is_in_batches(interpreter, (query, item), {}):
            rest[place] = _in_batches(query, item)[1]
    return interpreter.native(function, (query, *rest), kwargs)


@native_rule("_operator")
def _operator(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    if function in (operator.matmul, operator.imatmul) and _is_in_batches(interpreter, args, kwargs):
        return torch.bmm(*_in_batches(*args))
    return function(*args, **kwargs)


def _is_in_batches(interpreter: TracingInterpreter, operands: Arguments, kwargs: Keywords) -> bool:
    """Whether eager multiplies matrix by matrix with one that is the same for the whole batch, and needs no gradient.

    In a trace, torch takes each tensor for one of a subclass, and makes one product of them, which rounds in another way.
    """
    are_batches = all(isinstance(item, torch.Tensor) and item.dim() == 3 for item in operands)
    if kwargs or len(operands) != 2 or not are_batches or not interpreter.trace.settings.exact:
        return False
    first, second = operands
    is_for_all = second.shape[0] == 1 and first.shape[0] != 1
    return is_for_all and not second.requires_grad and private_state.functorch_level() is None


def _in_batches(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return first, second.expand(first.shape[0], -1, -1)
