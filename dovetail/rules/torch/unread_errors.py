"""Operators that raise where the data does not fit, and whose results nobody reads: eager raises all the same.

What nobody reads is dropped from a graph, and an index out of range with it. An operator of our own reads such a result, and does
nothing else. A gradient formula gives its operators data that fits, so this is about the operators of the program only.
"""

from __future__ import annotations

import operator

import torch

from dovetail.aot.nodes import BACKWARD_RUN, BY_USER_BACKWARD, STAYING, must_stay
from dovetail.trace.overrides import UNREAD

_library = torch.library.Library("dovetail", "FRAGMENT")
_library.define("read(Tensor value) -> ()")


def _read(value: torch.Tensor) -> None:
    """Leave a tensor as it is; only that the graph computes it matters."""


_library.impl("read", _read, "CompositeExplicitAutograd")
READ = torch.fx.has_side_effect(torch.ops.dovetail.read.default)
STAYING.add(READ)

_aten = torch.ops.aten
_PACKETS = (
    *(_aten.embedding, _aten._embedding_bag, _aten._embedding_bag_forward_only, _aten.index, _aten.index_select),
    *(_aten.index_put, _aten.index_add, _aten.index_copy, _aten.index_fill, _aten.index_reduce, _aten.gather),
    *(_aten.scatter, _aten.scatter_add, _aten.scatter_reduce, _aten.take, _aten.put, _aten.masked_scatter),
    *(_aten.nll_loss_forward, _aten.nll_loss2d_forward, _aten.multi_margin_loss, _aten._ctc_loss),
    *(_aten.multilabel_margin_loss_forward, _aten.binary_cross_entropy, _aten.max_unpool2d, _aten.max_unpool3d),
)
_RAISING = frozenset(getattr(packet, name) for packet in _PACKETS for name in packet.overloads())


def _may_raise(node: torch.fx.Node) -> bool:
    """Whether a node is an operator of the program's that may raise; the backwards that run inside have their own data.

    One without a value has raised while it was recorded, as ``_ctc_loss`` does, and the call was recorded in another way.
    """
    meta = node.meta
    is_programs = meta.get("phase") == "forward" and BACKWARD_RUN not in meta and BY_USER_BACKWARD not in meta
    return node.target in _RAISING and is_programs and "val" in meta


@UNREAD.append
def read_what_may_raise(graph: torch.fx.Graph) -> None:
    """Have the results of operators that may raise read by an operator that stays."""
    read: set[torch.fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in read or must_stay(node) or node.op == "output":
            read.update(node.all_input_nodes)
        elif _may_raise(node):
            read.update(node.all_input_nodes)
            _add_reader(graph, node)


def _add_reader(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    with graph.inserting_after(node):
        if isinstance(node.meta["val"], torch.Tensor):
            graph.call_function(READ, (node,)).meta = {**node.meta, "val": None}
            return
        first = graph.call_function(operator.getitem, (node, 0))
        first.meta = {**node.meta, "val": node.meta["val"][0]}
    _add_reader(graph, first)
