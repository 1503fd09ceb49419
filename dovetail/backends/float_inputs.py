"""Symbolic floats for a compiler that takes tensors and integers only: the tensors without dimensions that carry them.

A float times a tensor of at least one dimension gives that tensor's dtype, whether the float is a Python number or a
zero-dimensional tensor. Where the meaning would change, the graph is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.errors import BackendError

_aten = torch.ops.aten
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


def floats_as_tensors(graph: torch.fx.GraphModule) -> None:
    """Rewrite ``graph`` so that no float is read from a tensor; raises :class:`BackendError` where the meaning would change."""
    for scalar in graph.graph.find_nodes(op="call_function", target=_aten._local_scalar_dense.default):
        if not isinstance(scalar.meta.get("val"), torch.SymFloat):
            continue
        number = scalar.args[0]
        for user in list(scalar.users):
            _rewrite(graph.graph, user, scalar)
            user.replace_input_with(scalar, number)
        graph.graph.erase_node(scalar)


def _rewrite(graph: torch.fx.Graph, user: torch.fx.Node, number: torch.fx.Node) -> None:
    if user.target is _aten.add.Tensor and user.kwargs.get("alpha") is number and number not in user.args:
        with graph.inserting_before(user):
            product = graph.call_function(_aten.mul.Tensor, (user.args[1], number.args[0]))
        product.meta = {**user.meta, "val": user.args[1].meta["val"]}  # type: ignore[union-attr]
        _check(user, number, user.args[1])
        user.args = (user.args[0], product)
        user.kwargs = {}
        return
    target = _BINARY.get(user.target)
    others = [item for item in user.args if item is not number]
    if target is None or user.kwargs or len(others) != 1:
        raise _refusal(user, number)
    _check(user, number, others[0])
    user.target = target


def _check(user: torch.fx.Node, number: torch.fx.Node, other: Any) -> None:
    value = other.meta.get("val") if isinstance(other, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not (value.is_floating_point() or value.is_complex()):
        raise _refusal(user, number)


def _refusal(user: torch.fx.Node, number: torch.fx.Node) -> BackendError:
    return BackendError(
        f"the number {number.name}, which changes from call to call, is an argument of {user.target}, and the compiler "
        "takes such a number in sums, products, powers and comparisons with tensors only",
        where=user.meta.get("user_line"),
        advice='keep the number in a tensor, or use backend="aten"',
    )
