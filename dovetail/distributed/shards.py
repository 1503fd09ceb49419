"""Finds the values of a graph that are this rank's shards, and checks what is computed from them.

Element by element, anything may be. A norm or a sum over all elements becomes that of the whole, by an exchange. Any other operator
would take a shard for the whole, and is refused.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.distributed.exchange import Inserter, Team, collectives, places
from dovetail.distributed.operators import gather, replica, scatter
from dovetail.errors import ShardedOperationError

aten = torch.ops.aten
#: Operators that read the shape of their argument, not its values.
SHAPES = frozenset(
    {
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "zero", "fill"),
        *("new_zeros", "new_ones", "new_empty", "new_full"),
    }
)
#: Operators that compute element by element, though torch does not tag them so.
BY_ELEMENT = frozenset(
    {
        *("detach", "alias", "clone", "_to_copy", "copy", "lift_fresh_copy"),
        *("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"),
    }
)
#: Operators whose result is zero where all shards that they read are zero.
KEEP_ZERO = frozenset(
    {"detach", "alias", "clone", "_to_copy", "mul", "div", "neg", "abs", "square", "add", "sub", "sgn", "sqrt", "relu"}
)


@dataclass(frozen=True)
class Shards:
    """The nodes that are shards (or lists of shards), and those among them that are filled up with zeros."""

    nodes: frozenset[torch.fx.Node]
    zero: frozenset[torch.fx.Node]


def team_of(node: torch.fx.Node) -> Team:
    """The ranks of a gather or scatter."""
    size, name = node.args[-3], node.args[-2]
    assert isinstance(size, int) and isinstance(name, str)
    return Team(name, size)


def find_shards(joint: JointGraph) -> Shards:
    """Follow shards through the graph; raises :class:`ShardedOperationError` for an operator that needs the whole."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    sources = {_origin(node.args[0]) for node in joint.graph.find_nodes(op="call_function", target=gather)}
    while True:
        shards, zero = set(sources), set(sources)
        for node in joint.graph.nodes:
            if node.op == "call_function":
                _follow(node, shards, zero)
        grown = [
            placeholders[item.input_index]
            for item in joint.spec.mutations
            if joint.results[item.output_index] in shards and placeholders[item.input_index] not in shards
        ]
        if not grown:
            return Shards(frozenset(shards), frozenset(zero))
        sources.update(grown)


def _origin(node: Any) -> torch.fx.Node:
    while node.target in (aten.detach.default, aten.alias.default):
        (node,) = node.all_input_nodes
    return node  # type: ignore[no-any-return]


def _follow(node: torch.fx.Node, shards: set[torch.fx.Node], zero: set[torch.fx.Node]) -> None:
    """Add a node to the shards if it is one, and to ``zero`` if its filling is."""
    if node.target is scatter:
        shards.add(node)
        zero.add(node)
        return
    read = [item for item in node.all_input_nodes if item in shards]
    name = getattr(node.target, "_opname", "")
    if not read or node.target in (gather, replica) or name in SHAPES or is_whole_reduction(node):
        return
    if node.target is operator.getitem:
        shards.add(node)
        if read[0] in zero:
            zero.add(node)
        return
    same_view = name in ("view", "_unsafe_view") and _shape(node) == _shape(read[0])
    by_element = name in BY_ELEMENT or torch.Tag.pointwise in getattr(node.target, "tags", ())
    if not (by_element or same_view or (name.startswith("_foreach_") and "norm" not in name and name[9:] != "max")):
        raise refusal(node)
    shards.add(node)
    if same_view or name in KEEP_ZERO or _is_power(node):
        tensors = [item for item in node.all_input_nodes if _shape(item) == _shape(node)]
        by_shard = name == "div" and (len(tensors) > 1 or node.args[0] not in tensors)
        if tensors and all(item in zero for item in tensors) and not by_shard and not _adds_number(node):
            zero.add(node)


def _shape(node: torch.fx.Node) -> Any:
    return getattr(node.meta.get("val"), "shape", None)


def _is_power(node: torch.fx.Node) -> bool:
    exponent = node.args[1] if len(node.args) > 1 else None
    return node.target is aten.pow.Tensor_Scalar and isinstance(exponent, (int, float)) and exponent > 0


def _adds_number(node: torch.fx.Node) -> bool:
    """Whether a sum has another term than shards: a number, or a tensor that is broadcast."""
    if getattr(node.target, "_opname", "") not in ("add", "sub"):
        return False
    return not all(isinstance(item, torch.fx.Node) and _shape(item) == _shape(node) for item in node.args[:2])


def refusal(node: torch.fx.Node) -> ShardedOperationError:
    """The error for an operator that would take a shard for the whole."""
    return ShardedOperationError(
        f"{node.target} reads a parameter, a gradient or optimizer state of which this rank has only a part",
        where=node.meta.get("user_line"),
        advice="compute it element by element, as a norm or as a sum of all elements; or use data_parallel, where each rank has "
        "the whole",
    )


def is_whole_reduction(node: torch.fx.Node) -> bool:
    """Whether a node is a norm or a sum over all elements."""
    if node.target is aten.linalg_vector_norm.default:
        return len(node.args) < 3 and node.kwargs.get("dim") is None and not node.kwargs.get("keepdim", False)
    return node.target is aten.sum.default


def reduce_wholes(joint: JointGraph, team: Team) -> list[str]:
    """Turn norms and sums of shards into those of the whole; returns a line for the plan for each exchange that it takes."""
    _split_list_norms(joint)
    found = find_shards(joint)
    nodes = [
        node
        for node in joint.graph.nodes
        if node.op == "call_function" and is_whole_reduction(node) and node.all_input_nodes[0] in found.nodes
    ]
    for node in nodes:
        if node.all_input_nodes[0] not in found.zero:
            raise refusal(node)
    order = places(joint)
    steps = []
    while nodes:
        together = [nodes.pop(0)]
        key = _kind(together[0])
        # One exchange for all that are computed before the first of them is read.
        while nodes and _kind(nodes[0]) == key:
            readers = [order[reader] for item in together for reader in item.users]
            if min(readers, default=len(order)) < order[nodes[0]]:
                break
            together.append(nodes.pop(0))
        steps.append(f"all_reduce of {len(together)} norms or sums {key}")
        _reduce_together(joint, together, team, key[0])
    return steps


def _kind(node: torch.fx.Node) -> tuple[float, torch.dtype, torch.device]:
    """The exponent of a norm (-1.0 for a sum), its dtype and device."""
    value = node.meta["val"]
    if node.target is aten.sum.default:
        return -1.0, value.dtype, value.device
    exponent = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
    if not isinstance(exponent, (int, float)) or exponent < 0:
        raise refusal(node)
    return float(exponent), value.dtype, value.device


def _reduce_together(joint: JointGraph, nodes: list[torch.fx.Node], team: Team, exponent: float) -> None:
    readers = {node: set(node.users) for node in nodes}
    call = Inserter(joint, "forward").after(nodes[-1])
    added = exponent not in (math.inf, 0.0, -1.0)
    terms = [call(aten.pow.Tensor_Scalar, node, exponent) if added and exponent != 1.0 else node for node in nodes]
    begun = call(
        collectives.all_reduce.default,
        call(aten.stack.default, terms),
        "max" if exponent == math.inf else "sum",
        team.name,
    )
    done = call(collectives.wait_tensor.default, begun)
    if added and exponent != 1.0:
        done = call(aten.pow.Tensor_Scalar, done, 1.0 / exponent)
    for place, node in enumerate(nodes):
        whole = call(aten.select.int, done, 0, place)
        node.replace_all_uses_with(whole, delete_user_cb=readers[node].__contains__)


def _split_list_norms(joint: JointGraph) -> None:
    """Replace an operator for the norms of a list of tensors by one operator for each tensor."""
    for node in joint.graph.find_nodes(op="call_function", target=aten._foreach_norm.Scalar):
        tensors: Any = node.args[0]
        exponent = node.args[1] if len(node.args) > 1 else 2
        call = Inserter(joint, "forward").after(node)
        norms = [call(aten.linalg_vector_norm.default, tensor, exponent) for tensor in tensors]
        for user in list(node.users):
            user.replace_all_uses_with(norms[user.args[1]])  # type: ignore[index]
            joint.graph.erase_node(user)
        joint.graph.erase_node(node)
