"""The cheapest values to save, by a minimum cut.

The choice is a minimum cut in a flow network whose capacities are bytes (the construction of Chen et al., "Training Deep Nets
with Sublinear Memory Cost", 2016, recast as a cut as in min-cut rematerialisation); networkx solves it. Random operators and
expensive operators are never computed twice, so the numbers never change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch

from dovetail.aot.descriptors import BufferInput, ParamInput
from dovetail.aot.nodes import SAVE, must_stay, tensor_of
from dovetail.torch_private import sizes as private_sizes

CHEAP_NAMES = frozenset({
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice",
    "select", "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "diagonal", "full",
    "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_ones", "empty_like", "arange",
    "scalar_tensor", "_to_copy", "clone", "cat", "stack", "constant_pad_nd", "where", "masked_fill",
})  # fmt: skip
"""Operators that move values, or make constants: cheap to compute again."""
_BY_INDEX = frozenset(
    {"gather", "index", "index_select", "embedding", "scatter", "select_scatter", "slice_scatter", "iota", "flip"}
)
# Torch 2.11 has no such tag.
_REDUCTION = getattr(torch.Tag, "reduction", None)


def value_bytes(node: torch.fx.Node) -> int:
    """Bytes of a node's tensor; one for a number."""
    value = tensor_of(node)
    return 1 if value is None else max(1, private_sizes.hint(value.numel()) * value.element_size())


def _by_elements(node: torch.fx.Node) -> bool:
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    return getattr(node.target, "_opname", "") in CHEAP_NAMES


def _is_cheap(node: torch.fx.Node) -> bool:
    """Whether a value is rather computed again than saved, if that saves memory."""
    if private_sizes.is_symbolic(node.meta.get("val")):
        return True
    if node.meta.get(SAVE):
        return False
    if node.meta.get("recompute"):
        return not must_stay(node)
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    return node.op == "call_function" and not must_stay(node) and _by_elements(node)


def is_fused(node: torch.fx.Node) -> bool:
    """Whether a compiler that fuses computes this operator in one kernel with its neighbours, in no memory of its own."""
    if node.target is operator.getitem or _by_elements(node) or _REDUCTION in getattr(node.target, "tags", ()):
        return True
    return getattr(node.target, "_opname", "") in _BY_INDEX


def cost_of_keeping(node: torch.fx.Node) -> int:
    """What a value weighs in the cut."""
    # Parameters and buffers are alive anyway; a view costs what its base costs, and is preferred less than the base.
    if isinstance(node.meta.get("desc"), (ParamInput, BufferInput)):
        return 1
    return 2 * value_bytes(node) + (0 if node.op == "placeholder" else 1)


def minimum_cut(
    read: Collection[torch.fx.Node],
    cost: Callable[[torch.fx.Node], int] = cost_of_keeping,
    reused: Collection[torch.fx.Node] = (),
) -> list[torch.fx.Node]:
    """The cheapest set of values from which all that the backward reads can be computed without expensive operators.

    ``cost`` says what it costs to keep a value. Nodes that are ``reused`` are inputs.
    """
    network, relevant = _network(read, cost, reused)
    if "source" not in network or "sink" not in network:
        return []
    import networkx  # takes a tenth of a second, and inference needs none of it

    _, (reachable, _) = networkx.minimum_cut(
        network, "source", "sink", flow_func=networkx.algorithms.flow.boykov_kolmogorov
    )
    return [
        node
        for node in relevant
        if (node.name, "in") in reachable
        and network.has_node((node.name, "out"))
        and (node.name, "out") not in reachable
        and network.has_edge((node.name, "in"), (node.name, "out"))
    ]


def _network(
    read: Collection[torch.fx.Node], cost: Callable[[torch.fx.Node], int], reused: Collection[torch.fx.Node]
) -> tuple[Any, set[torch.fx.Node]]:
    """Each value is an edge with its cost as capacity; the source leads to what cannot be computed again, ``read`` to the sink."""
    import networkx

    network: Any = networkx.DiGraph()
    relevant: set[torch.fx.Node] = set()
    stack = list(read)
    while stack:
        node = stack.pop()
        if node in relevant:
            continue
        relevant.add(node)
        entering, leaving = (node.name, "in"), (node.name, "out")
        if node in read:
            network.add_edge(leaving, "sink")
        if isinstance(node.meta.get("val"), (tuple, list)):
            # A tuple cannot be saved; its parts can, so the cut is moved to them.
            network.add_edge(entering, leaving)
        else:
            network.add_edge(entering, leaving, capacity=cost(node))
        if node in reused or node.op in ("placeholder", "get_attr") or not _is_cheap(node):
            network.add_edge("source", entering)
        elif not node.all_input_nodes:
            network.remove_edge(entering, leaving)
        for argument in () if network.has_edge("source", entering) else node.all_input_nodes:
            network.add_edge((argument.name, "out"), entering)
            stack.append(argument)
    return network, relevant
