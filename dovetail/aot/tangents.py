"""Leave out tangents that are not defined.

Autograd's engine does not propagate an undefined gradient: it is not a tensor of zeros, and an infinity on its way does not
turn it into NaN. A first-order backward is linear in its tangents, so a node all of whose tangent-dependent arguments are
zero is zero itself; a sum with a zero is the other summand; where one of several arguments is zero, zeros are made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.artefacts.size_expressions import size_in_graph
from dovetail.torch_private import sizes as private_sizes

_SUMS = (torch.ops.aten.add.Tensor,)

# Marks in a node's ``meta``, for gradients that are packed into one tensor and taken out again. PACK: its first argument is the
# list of what is packed. MEMBER: it is what was packed as this one of the list; where that is zero, there is no gradient.
# FOR_PATTERN: ``function(args, defined)`` gives the node's arguments in a backward for some of the tangents.
PACK = "pack"
MEMBER = "member"
FOR_PATTERN = "for_pattern"


def shares_places(output: torch.Tensor) -> bool:
    """Whether places of a tensor share memory, as windows that overlap do: no gradient can be laid out like it.

    >>> shares_places(torch.ones(4).as_strided((3, 2), (1, 1))), shares_places(torch.ones(3, 2).t())
    (True, False)
    """
    pairs = zip(output.stride(), output.shape, strict=True)
    steps = sorted((private_sizes.hint(stride), private_sizes.hint(size)) for stride, size in pairs)
    reach = 0
    for stride, size in steps:
        if size > 1 and stride <= reach:
            return True
        reach += max(size - 1, 0) * stride
    return False


def specialise_tangents(
    backward: torch.fx.GraphModule, positions: Sequence[int], defined: Sequence[bool]
) -> tuple[torch.fx.GraphModule, list[int]]:
    """A backward graph without the placeholders of undefined tangents, and the positions of inputs that are no longer used.

    ``positions`` are those of the tangents among the placeholders, ``defined`` says which of them there are. Unused inputs
    are removed from the graph as well; a gradient that is zero becomes None in the outputs.
    """
    placeholders = backward.graph.find_nodes(op="placeholder")
    tangents = {placeholders[position] for position in positions}
    zero = {placeholders[position] for position, flag in zip(positions, defined, strict=True) if not flag}
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    dependent = set(tangents)
    other_strides = False

    def zeros_like(node: torch.fx.Node) -> torch.fx.Node:
        value = node.meta["val"]
        made = graph.call_function(
            torch.ops.aten.zeros.default,
            ([size_in_graph(graph, size, list(copies.values())) for size in value.shape],),
            {"dtype": value.dtype, "device": value.device},
        )
        made.meta = {"val": value.new_zeros(value.shape), "phase": "backward"}
        return made

    def argument(node: torch.fx.Node) -> torch.fx.Node:
        return zeros_like(node) if node in zero else copies[node]

    for node in backward.graph.nodes:
        if node.op == "placeholder":
            if node not in zero:
                copies[node] = graph.placeholder(node.name)
                copies[node].meta = dict(node.meta)
            continue
        if node.op == "output":
            results: Any = node.args[0]
            graph.output([None if item is None or _is_zero(item, zero) else copies[item] for item in results])
            continue
        inputs = [item for item in node.all_input_nodes if item in dependent]
        if inputs:
            dependent.add(node)
        missing = [item for item in inputs if item in zero]
        if inputs and len(missing) == len(inputs):
            zero.add(node)
            continue
        if missing and node.target in _SUMS and not node.kwargs and len(node.args) == 2:
            (other,) = [item for item in node.args if item not in missing] or [None]
            if isinstance(other, torch.fx.Node) and _same_kind(other, node):
                copies[node] = copies[other]
                other_strides = other_strides or other.meta["val"].stride() != node.meta["val"].stride()
                continue
        copies[node] = graph.node_copy(node, argument)
        if other_strides and inputs and node.target is torch.ops.aten.view.default:
            # A sum may have had other strides than its one summand. Eager's formulas reshape.
            copies[node].target = torch.ops.aten.reshape.default
        if FOR_PATTERN in node.meta:
            copies[node].args = node.meta[FOR_PATTERN](copies[node].args, tuple(defined))
        copies[node].meta = dict(node.meta)
    graph.eliminate_dead_code()
    unused = []
    for position, node in enumerate(placeholders):
        if position not in positions and not copies[node].users:
            graph.erase_node(copies[node])
            unused.append(position)
    return torch.fx.GraphModule(backward, graph), unused


def _is_zero(node: torch.fx.Node, zero: set[torch.fx.Node]) -> bool:
    if node in zero or MEMBER not in node.meta:
        return node in zero
    pack = node
    while PACK not in pack.meta:
        pack = pack.all_input_nodes[0]
    members: Any = pack.args[0]
    return members[node.meta[MEMBER]] in zero


def _same_kind(left: torch.fx.Node, right: torch.fx.Node) -> bool:
    a, b = left.meta["val"], right.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.device == b.device)
