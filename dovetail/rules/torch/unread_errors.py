"""Operators that raise where the data does not fit, and whose results nobody reads: eager raises all the same.

What nobody reads is dropped from a graph, and an index out of range with it. An operator of our own reads such a result, and does
nothing else. A gradient formula gives its operators data that fits, so this is about the operators of the program only.
"""

from __future__ import annotations

import operator

import torch

from dovetail.aot.nodes import BACKWARD_RUN, BY_USER_BACKWARD, STAYING, must_stay, tensor_of
from dovetail.torch_private.operators import OpOverload
from dovetail.torch_private.sizes import has_symbols
from dovetail.torch_private.tracing import disable_current_modes
from dovetail.trace.overrides import UNREAD
from dovetail.trace.repeats import draws_random_numbers

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
    _aten.segment_reduce,
)
_RAISING = frozenset(getattr(packet, name) for packet in _PACKETS for name in packet.overloads())


def _may_raise(node: torch.fx.Node) -> bool:
    """Whether a node is an operator of the program's that may raise; the backwards that run inside have their own data.

    One without a value has raised while it was recorded, as ``_ctc_loss`` does, and the call was recorded in another way.
    """
    meta = node.meta
    is_programs = meta.get("phase") == "forward" and BACKWARD_RUN not in meta and BY_USER_BACKWARD not in meta
    return is_programs and "val" in meta and (node.target in _RAISING or _lacks_kernel(node))


_MOST_ELEMENTS = 100_000


def _lacks_kernel(node: torch.fx.Node) -> bool:
    """Whether the kernel does not take numbers of this type, which need not be real ones: it is asked with zeros.

    Kernels for real numbers take them all, as far as programs come by it, and are not asked.
    """
    given = [tensor_of(item) for item in node.all_input_nodes]
    call = node.target
    if not isinstance(call, OpOverload) or call.namespace != "aten" or draws_random_numbers(call):
        return False
    values = [item for item in given if item is not None]
    if len(values) < len(given) or not values or any(item.is_floating_point() for item in values):
        return False
    if any(item.device.type != "cpu" or item.layout is not torch.strided for item in values):
        return False
    found = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
    results = [item for item in found if isinstance(item, torch.Tensor)]
    if any(has_symbols(item) or item.numel() > _MOST_ELEMENTS for item in (*values, *results)):
        return False
    with disable_current_modes():
        zeros = {
            item: torch.zeros(value.shape, dtype=value.dtype)
            for item, value in zip(node.all_input_nodes, values, strict=True)
        }
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), zeros.__getitem__)
        try:
            call(*args, **kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            return any(word in str(error) for word in ("support", "implemented"))
    return False


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
