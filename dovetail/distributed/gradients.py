"""Gradients of parameters in a joint graph, on their way into ``.grad`` or out of the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from dovetail.aot.descriptors import BufferInput, Descriptor, Gradient, ParamInput
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import must_stay
from dovetail.distributed.exchange import Site, places
from dovetail.distributed.placement import is_data
from dovetail.rules.gradients.marks import GRADIENT_OF, NAME

aten = torch.ops.aten


def gradient_sites(joint: JointGraph) -> list[Site]:
    """All gradients of parameters, in the order in which they are computed.

    Those that the graph itself reads, after a ``backward()`` in it, have the node that the trace has marked for their ``mark``.
    """
    sites = [
        _marked_site(joint, node)
        for node in joint.graph.nodes
        if GRADIENT_OF in node.meta and node.users and not is_data(joint.input_descriptors[node.meta[GRADIENT_OF]])
    ]
    readers = (joint.graph.output_node(),)
    for node, descriptor in zip(joint.results, joint.output_descriptors, strict=True):
        if node is not None and isinstance(descriptor, Gradient) and not is_data(descriptor.of):
            replace = functools.partial(joint.replace_output, descriptor)
            sites.append(Site(name_of(descriptor.of), node, node.meta["val"], readers, replace))
    order = places(joint)
    return sorted(sites, key=lambda site: order[site.node])


def _marked_site(joint: JointGraph, node: torch.fx.Node) -> Site:
    source = node
    if node.target is aten.clone.default and not node.kwargs:
        # The trace's own copy; the bucket is a second one.
        (source,) = node.all_input_nodes
    name = node.meta.get(NAME) or name_of(joint.input_descriptors[node.meta[GRADIENT_OF]])
    return Site.of_readers(name, source, source.meta["val"], node)


def name_of(descriptor: Descriptor) -> str:
    """The name of an input in a plan."""
    return descriptor.fqn if isinstance(descriptor, (ParamInput, BufferInput)) else str(descriptor)


def merge_accumulated(joint: JointGraph) -> None:
    """Move the marks of two gradients that are only added up to their sum: one exchange, as after ``no_sync``."""
    for node, left, right in _sums(joint, lambda node: GRADIENT_OF in node.meta):
        if left.meta[GRADIENT_OF] == right.meta[GRADIENT_OF]:
            del left.meta[GRADIENT_OF]
            node.meta[GRADIENT_OF] = right.meta.pop(GRADIENT_OF)


def merge_exchanges(joint: JointGraph, targets: Collection[Any]) -> None:
    """Replace the sum of two exchanged gradients by one exchange of their sum; ``targets`` are the operators that exchange."""
    for node, left, right in _sums(joint, lambda node: node.target in targets):
        if left.target is right.target and left.args[1:] == right.args[1:]:
            with joint.graph.inserting_before(node):
                total = joint.graph.call_function(aten.add.Tensor, (left.args[0], right.args[0]))
                merged = joint.graph.call_function(left.target, (total, *left.args[1:]))  # type: ignore[arg-type]
            total.meta = {**node.meta, "val": left.args[0].meta["val"]}  # type: ignore[union-attr]
            total.meta.pop("signature", None)
            merged.meta = dict(left.meta)
            node.replace_all_uses_with(merged)
            joint.graph.eliminate_dead_code(is_impure_node=must_stay)


def _sums(
    joint: JointGraph, is_gradient: Callable[[torch.fx.Node], bool]
) -> Iterator[tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node]]:
    for node in joint.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if len(node.args) != 2 or node.kwargs or not all(isinstance(part, torch.fx.Node) for part in node.args):
            continue
        left, right = (_gradient_behind(part, is_gradient) for part in node.args)  # type: ignore[arg-type]
        if left is not None and right is not None and left is not right:
            yield node, left, right


def _gradient_behind(node: torch.fx.Node, is_gradient: Callable[[torch.fx.Node], bool]) -> torch.fx.Node | None:
    """The gradient that a node is or detaches, if nothing else reads it."""
    while len(node.users) == 1:
        if is_gradient(node):
            return node
        if node.target is not aten.detach.default:
            return None
        (node,) = node.all_input_nodes
    return None


def defer_readers(joint: JointGraph, is_gradient: Callable[[torch.fx.Node], bool]) -> None:
    """Move the readers of reduced gradients behind all other nodes, so that the exchange has that long to finish.

    Otherwise nodes keep their order; operators that draw random numbers or check something keep theirs among all others.
    """
    level: dict[torch.fx.Node, int] = {}
    staying = 0
    for node in joint.graph.nodes:
        found = max((level[item] + is_gradient(item) for item in node.all_input_nodes), default=0)
        if node.op == "call_function" and must_stay(node):
            found = staying = max(found, staying)
        level[node] = found
    nodes = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
    output = joint.graph.output_node()
    for node in sorted(nodes, key=level.__getitem__):
        output.prepend(node)


def is_marked(node: torch.fx.Node) -> bool:
    """Whether the trace has marked a node as a gradient."""
    return GRADIENT_OF in node.meta
