"""Symbolic floats for a compiler that takes tensors and integers only: the tensors without dimensions that carry them.

A float times a tensor of at least one dimension gives that tensor's dtype, whether the float is a Python number or a
zero-dimensional tensor. Where the meaning would change, the graph is refused.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from dovetail.errors import BackendError
from dovetail.trace.python_numbers import real_power

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_BINARY: dict[Any, Any] = {
    _aten.add.Tensor: _aten.add.Tensor,
    _aten.sub.Tensor: _aten.sub.Tensor,
    _aten.mul.Tensor: _aten.mul.Tensor,
    _aten.div.Tensor: _aten.div.Tensor,
    _aten.add.Scalar: _aten.add.Tensor,
    _aten.sub.Scalar: _aten.sub.Tensor,
    _aten.mul.Scalar: _aten.mul.Tensor,
    _aten.div.Scalar: _aten.div.Tensor,
    _aten.pow.Tensor_Scalar: _aten.pow.Tensor_Tensor,
    _aten.eq.Scalar: _aten.eq.Tensor,
    _aten.ne.Scalar: _aten.ne.Tensor,
    _aten.lt.Scalar: _aten.lt.Tensor,
    _aten.le.Scalar: _aten.le.Tensor,
    _aten.gt.Scalar: _aten.gt.Tensor,
    _aten.ge.Scalar: _aten.ge.Tensor,
}


_SCALED: dict[Any, Any] = {_aten.addcdiv.default: _aten.div.Tensor, _aten.addcmul.default: _aten.mul.Tensor}
_NUMBERS: dict[Any, Any] = {
    operator.add: _aten.add.Tensor,
    operator.iadd: _aten.add.Tensor,
    operator.sub: _aten.sub.Tensor,
    operator.isub: _aten.sub.Tensor,
    operator.mul: _aten.mul.Tensor,
    operator.imul: _aten.mul.Tensor,
    operator.truediv: _aten.div.Tensor,
    operator.itruediv: _aten.div.Tensor,
    operator.neg: _aten.neg.default,
    abs: _aten.abs.default,
    max: _aten.maximum.default,
    min: _aten.minimum.default,
    math.sqrt: _aten.sqrt.default,
    math.exp: _aten.exp.default,
    operator.pow: _aten.pow.Tensor_Tensor,
    real_power: _aten.pow.Tensor_Tensor,
}
"""What Python computes from numbers, on tensors of double precision without dimensions."""


def floats_as_tensors(graph: torch.fx.GraphModule) -> None:
    """Rewrite ``graph`` so that no float is read from a tensor; raises :class:`BackendError` where the meaning would change."""
    scalars = [node for node in graph.graph.nodes if _is_float(node)]
    tensors: dict[torch.fx.Node, torch.fx.Node] = {}
    for scalar in scalars:
        if scalar.target is _aten._local_scalar_dense.default:
            tensors[scalar] = _double(graph.graph, scalar)
        else:
            tensors[scalar] = _computed(graph.graph, scalar, tensors)
    for scalar in scalars:
        for user in list(scalar.users):
            if user in tensors:
                continue
            number = tensors[scalar]
            if scalar.target is _aten._local_scalar_dense.default:
                number = scalar.args[0]  # type: ignore[assignment]
            number = _rewrite(graph.graph, user, scalar, number)
            user.replace_input_with(scalar, number)
    for scalar in reversed(scalars):
        graph.graph.erase_node(scalar)
    for number in reversed(tensors.values()):
        if not number.users:
            graph.graph.erase_node(number)


def _is_float(node: torch.fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.meta.get("val"), torch.SymFloat)
        and (node.target is _aten._local_scalar_dense.default or node.target in _NUMBERS)
    )


def _double(graph: torch.fx.Graph, scalar: torch.fx.Node) -> torch.fx.Node:
    tensor: Any = scalar.args[0]
    with graph.inserting_after(scalar):
        made = graph.call_function(_CONVERT, (tensor, torch.float64))
    return _with_value(made, scalar, tensor.meta["val"].to(torch.float64))


def _computed(
    graph: torch.fx.Graph, scalar: torch.fx.Node, tensors: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """The tensor that holds what Python would compute."""
    known = [tensors[item] for item in scalar.args if isinstance(item, torch.fx.Node) and item in tensors]
    if not known or len(known) < sum(isinstance(item, torch.fx.Node) for item in scalar.args):
        raise _refusal(scalar, scalar)
    example = known[0].meta["val"]
    with graph.inserting_before(scalar):
        arguments = []
        for item in scalar.args:
            if isinstance(item, torch.fx.Node):
                arguments.append(tensors[item])
                continue
            settings = {"dtype": torch.float64, "device": example.device}
            constant = graph.call_function(_aten.full.default, ([], item), settings)
            arguments.append(_with_value(constant, scalar, example))
        made = graph.call_function(_NUMBERS[scalar.target], tuple(arguments))
    return _with_value(made, scalar, example)


def _with_value(made: torch.fx.Node, scalar: torch.fx.Node, value: torch.Tensor) -> torch.fx.Node:
    # The symbol that the number was is no more.
    made.meta = {**scalar.meta, "val": value}
    made.meta.pop("unbacked_bindings", None)
    return made


def _rewrite(graph: torch.fx.Graph, user: torch.fx.Node, number: torch.fx.Node, tensor: torch.fx.Node) -> torch.fx.Node:
    """Let ``user`` take the tensor; returns what takes the number's place among its arguments."""
    if user.target is _aten.add.Tensor and user.kwargs.get("alpha") is number and number not in user.args:
        with graph.inserting_before(user):
            product = graph.call_function(_aten.mul.Tensor, (user.args[1], tensor))
        product.meta = {**user.meta, "val": user.args[1].meta["val"]}  # type: ignore[union-attr]
        _check(user, number, user.args[1], dimensions=True)
        user.args = (user.args[0], product)
        user.kwargs = {}
        return tensor
    if user.target in _SCALED and user.kwargs == {"value": number} and number not in user.args:
        _check(user, number, user.args[1], dimensions=True)
        value = user.args[1].meta["val"]  # type: ignore[union-attr]
        with graph.inserting_before(user):
            inner = graph.call_function(_SCALED[user.target], user.args[1:])
            product = graph.call_function(_aten.mul.Tensor, (inner, tensor))
        inner.meta = product.meta = {**user.meta, "val": value}
        user.target, user.args, user.kwargs = _aten.add.Tensor, (user.args[0], product), {}
        return tensor
    if user.target is _aten.scalar_tensor.default and user.args == (number,):
        dtype = user.kwargs.get("dtype") or torch.get_default_dtype()
        user.target, user.args, user.kwargs = _CONVERT, (tensor, dtype), {}
        return tensor
    target = _BINARY.get(user.target)
    others = [item for item in user.args if item is not number]
    if target is None or user.kwargs or len(others) != 1:
        raise _refusal(user, number)
    value = _check(user, number, others[0])
    user.target = target
    if value.dim() == 0:
        # Beside a tensor with dimensions, the number's type does not count; here it would.
        with graph.inserting_before(user):
            converted = graph.call_function(_CONVERT, (tensor, value.dtype))
        converted.meta = {**user.meta, "val": value}
        return converted
    return tensor


def _check(user: torch.fx.Node, number: torch.fx.Node, other: Any, dimensions: bool = False) -> torch.Tensor:
    value = other.meta.get("val") if isinstance(other, torch.fx.Node) else None
    if (
        not isinstance(value, torch.Tensor)
        or (dimensions and value.dim() == 0)
        or not (value.is_floating_point() or value.is_complex())
    ):
        raise _refusal(user, number)
    return value


def _refusal(user: torch.fx.Node, number: torch.fx.Node) -> BackendError:
    return BackendError(
        f"the number {number.name}, which changes from call to call, is an argument of {user.target}, and the compiler "
        "takes such a number in sums, products, powers and comparisons with tensors only",
        where=user.meta.get("user_line"),
        advice='keep the number in a tensor, or use backend="aten"',
    )
