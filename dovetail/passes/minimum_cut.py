"""The cheapest values to save, by a minimum cut.

The choice is a minimum cut in a flow network whose capacities are bytes (the construction of Chen et al., "Training Deep Nets
with Sublinear Memory Cost", 2016, recast as a cut as in min-cut rematerialisation), found along
shortest paths. Random operators and expensive operators are never computed twice, so the numbers never change.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch

from dovetail.aot.descriptors import BufferInput, ParamInput
from dovetail.aot.nodes import SAVE, must_stay, tensor_of
from dovetail.errors import GraphInvalidError
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
    """The weight of a value in the cut."""
    if private_sizes.is_symbolic(node.meta.get("val")):
        # A size is kept by itself: the program may write to its tensor before the backward.
        return 1
    # Parameters and buffers are alive anyway; a view costs what its base costs, and is preferred less than the base.
    if isinstance(node.meta.get("desc"), (ParamInput, BufferInput)):
        return 32
    value = tensor_of(node)
    size = 1 if value is None else max(1, private_sizes.hint(value.numel()) * value.element_size())
    return 2 * size + (0 if node.op == "placeholder" else 1)


def minimum_cut(
    read: Collection[torch.fx.Node],
    cost: Callable[[torch.fx.Node], int] = cost_of_keeping,
    reused: Collection[torch.fx.Node] = (),
) -> list[torch.fx.Node]:
    """The cheapest set of values from which all that the backward reads can be computed without expensive operators.

    ``cost`` says what it costs to keep a value. Nodes that are ``reused`` are inputs.
    """
    left, relevant = _network(read, cost, reused)
    if "source" not in left or "sink" not in left:
        return []
    behind = _behind_the_cut(left)
    # A constant is computed again: nothing enters it.
    ends = ((node, (node.name, "in"), (node.name, "out")) for node in relevant)
    return [
        node for node, entering, leaving in ends if entering in left and entering not in behind and leaving in behind
    ]


#: The capacity left, by the two ends of an edge.
_Left = dict[Any, dict[Any, float]]


def _network(
    read: Collection[torch.fx.Node], cost: Callable[[torch.fx.Node], int], reused: Collection[torch.fx.Node]
) -> tuple[_Left, set[torch.fx.Node]]:
    """Each value is an edge with its cost as capacity; the source leads to what cannot be computed again, ``read`` to the sink."""
    left: _Left = {}

    def add_edge(start: Any, end: Any, capacity: float = math.inf) -> None:
        left.setdefault(start, {})[end] = capacity
        left.setdefault(end, {}).setdefault(start, 0)

    relevant: set[torch.fx.Node] = set()
    stack = list(read)
    while stack:
        node = stack.pop()
        if node in relevant:
            continue
        relevant.add(node)
        entering, leaving = (node.name, "in"), (node.name, "out")
        if node in read:
            add_edge(leaving, "sink")
        is_given = node in reused or node.op in ("placeholder", "get_attr") or not _is_cheap(node)
        if is_given or node.all_input_nodes:
            # A tuple cannot be saved; its parts can, so the cut is moved to them.
            is_tuple = isinstance(node.meta.get("val"), (tuple, list))
            add_edge(entering, leaving, math.inf if is_tuple else cost(node))
        if is_given:
            add_edge("source", entering)
            continue
        for argument in node.all_input_nodes:
            add_edge((argument.name, "out"), entering)
            stack.append(argument)
    return left, relevant


def _behind_the_cut(left: _Left) -> Collection[Any]:
    """From where the sink can be reached when as much flows as can; of all minimum cuts, this is the one nearest to the sink."""
    while True:
        towards: dict[Any, Any] = {"sink": None}
        queue: list[Any] = ["sink"]
        for node in queue:
            for before in left[node]:
                if before not in towards and left[before][node]:
                    towards[before] = node
                    queue.append(before)
        if "source" not in towards:
            return towards
        for first in left["source"]:
            path = ["source"]
            while first is not None and first in towards:
                path.append(first)
                first = towards[first]
            steps = list(itertools.pairwise(path))
            amount = min((left[start][end] for start, end in steps), default=0)
            if amount == math.inf:
                raise GraphInvalidError("the backward reads a tuple that cannot be saved")
            for start, end in steps:
                left[start][end] -= amount
                left[end][start] += amount
