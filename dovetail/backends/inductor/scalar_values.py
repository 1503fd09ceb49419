"""Scalars computed once, not again for each element of the tensors that they are combined with.

Inductor inlines the computation of a zero-dimensional tensor into every kernel that reads it. For an optimizer that is
``1 - beta ** step`` in double precision for each weight: the kernel is not vectorised, and the update of a million weights took
twice as long (torch 2.13, CPU). Older versions of torch lack the operator that this needs, and run as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.torch_private import inductor as private_inductor
from dovetail.torch_private import operators as private_operators

_WIDENING = (torch.float32, torch.bfloat16, torch.float16)


def compute_scalars_once(graph: torch.fx.GraphModule) -> None:
    """Keep computed scalars in memory where tensors with dimensions read them, in the precision of those tensors."""
    realize = private_inductor.inductor_realize()
    if realize is None:
        return
    kept: dict[tuple[torch.fx.Node, torch.dtype], torch.fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not _computes_elements(node):
            continue
        precision = _precision(node)
        for scalar in node.all_input_nodes:
            if not _is_computed_scalar(scalar):
                continue
            key = (scalar, precision)
            if key not in kept:
                kept[key] = _keep(graph.graph, scalar, precision, realize)
            node.replace_input_with(scalar, kept[key])


def _computes_elements(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and value.device.type == "cpu"
        and value.is_floating_point()
        and isinstance(node.target, private_operators.OpOverload)
        and torch.Tag.pointwise in node.target.tags
    )


def _precision(node: torch.fx.Node) -> torch.dtype:
    """Return the precision in which an operator combines scalars and elements: the tensor's own, at least single precision."""
    dtype: torch.dtype = node.meta["val"].dtype
    return torch.float32 if dtype in _WIDENING else dtype


def _is_computed_scalar(node: torch.fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.dim() == 0
        and value.is_floating_point()
        and bool(node.all_input_nodes)
    )


def _keep(graph: torch.fx.Graph, scalar: torch.fx.Node, precision: torch.dtype, realize: Any) -> torch.fx.Node:
    with graph.inserting_after(scalar):
        source, value = scalar, scalar.meta["val"]
        if value.dtype == torch.float64 and precision != torch.float64:
            source = graph.call_function(torch.ops.prims.convert_element_type.default, (scalar, precision))
            value = value.to(precision)
            source.meta = {**scalar.meta, "val": value}
    with graph.inserting_after(source):
        made = graph.call_function(realize, (source,))
    made.meta = {**scalar.meta, "val": value}
    return made
