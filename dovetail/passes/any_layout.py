"""Tangents as they lie in memory: a backward that may be given them in any layout, for the backend that is bitwise.

What follows the call decides how a tangent lies: ``sum()`` hands back one number expanded, a transposition a transposed tensor.
Eager's kernels add up in another order then. A backward is captured for tangents that lie as the results do. Others are copied into
that layout, unless all operators on their way take any: these are called by eager's formulas with the gradient as it is.
"""

from __future__ import annotations

import dataclasses
import operator

import torch

from dovetail.aot.backward_graphs import ANY_LAYOUT
from dovetail.aot.nodes import BY_USER_BACKWARD, depending_on
from dovetail.aot.steps import Lowering, after_partition
from dovetail.passes.editing import copy_graph

_aten = torch.ops.aten
#: Whether the result is a view depends on the layout.
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_NAMES = """
    view _unsafe_view reshape alias avg_pool2d_backward bmm cat clone constant_pad_nd convolution_backward detach
    embedding_dense_backward expand flip max_pool2d_with_indices_backward mean mean.dim mm native_batch_norm_backward
    native_layer_norm_backward permute select.int slice.Tensor squeeze squeeze.dim squeeze.dims sum sum.dim_IntList t transpose.int
    unbind.int unsqueeze _to_copy _log_softmax_backward_data _softmax_backward_data
"""
_TAKING_ANY = frozenset(
    getattr(getattr(_aten, name), overload or "default")
    for name, _, overload in (item.partition(".") for item in _NAMES.split())
)


@after_partition
def take_any_layout(lowering: Lowering) -> Lowering:
    """Mark the tangents that the backward may be given as they are, and reshape where it takes views of them."""
    parts, tangents = lowering.parts, lowering.joint.tangents
    for node in tangents:
        # The graph may have been compiled for another backend before.
        node.meta.pop(ANY_LAYOUT, None)
    if lowering.backend.name != "aten" or parts is None or parts.backward is None:
        return lowering
    if not all(map(_takes_any, _called_with_tangents(parts.backward, len(tangents)))):
        return lowering
    copied = copy_graph(parts.backward)
    for node in _called_with_tangents(copied, len(tangents)):
        if node.target in _VIEWS:
            node.target = _aten.reshape.default
    for node in tangents:
        node.meta[ANY_LAYOUT] = True
    return lowering.with_(parts=dataclasses.replace(parts, backward=copied))


def _called_with_tangents(backward: torch.fx.GraphModule, count: int) -> list[torch.fx.Node]:
    """The operators that the last so many inputs reach."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    reached = depending_on(backward.graph.nodes, placeholders[len(placeholders) - count :])
    return [node for node in reached if node.op == "call_function"]


def _takes_any(node: torch.fx.Node) -> bool:
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    known = node.target in _TAKING_ANY or is_pointwise or node.target is operator.getitem
    return known and not node.meta.get(BY_USER_BACKWARD)
