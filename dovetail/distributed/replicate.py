"""The pass of data-parallel training: each rank has all parameters, and gradients are reduced over the ranks.

Gradients are put together in buckets, in the order in which the graph computes them. A bucket's exchange begins right behind its
last gradient, and is awaited right in front of the first operator that reads one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dovetail.aot.descriptors import BufferInput, MutatedInput
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import checks_assumption
from dovetail.distributed.buckets import Phase, make_buckets
from dovetail.distributed.exchange import Team, collectives, describe, pack, real_dtype, unpack
from dovetail.distributed.gradients import GradientSite, defer_readers, gradient_sites, is_marked, merge_accumulated
from dovetail.distributed.placement import check_parameters
from dovetail.distributed.plan import Plan
from dovetail.errors import DistributedError
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.gradient_marks import EXCHANGE, GRADIENT_OF


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: over which ranks, in buckets of which size, to the "mean" or "sum", with or without a check."""

    team: Team
    bucket_bytes: int
    kind: str = "mean"
    check: bool = True


def replicate(
    team: Team, *, bucket_bytes: int = 25 << 20, reduction: str = "mean", check: bool = True, buffers: bool = True
) -> Callable[[JointGraph], None]:
    """A pass: the gradients of all parameters are reduced over the ranks of ``team``.

    ``reduction`` is "mean" or "sum". With ``check`` the ranks make sure at each call that they exchange the same things. With
    ``buffers`` a buffer that the graph writes to (the running mean of a batch norm) has at each call the first rank's value.
    """
    settings = Reduction(team, bucket_bytes, reduction, check)

    def reduce_gradients(joint: JointGraph) -> None:
        refuse_assumptions(joint)
        if any(EXCHANGE in node.meta for node in joint.graph.nodes):
            raise DistributedError(
                "a module in DistributedDataParallel is called in a data-parallel step, and both would exchange the gradients",
                advice="hand over the module itself, or use dovetail.compile",
            )
        if buffers:
            _broadcast_buffers(joint, settings)
        if any(GRADIENT_OF in node.meta for node in joint.graph.nodes):
            merge_accumulated(joint)
            defer_readers(joint, is_marked)
        sites = gradient_sites(joint)
        for site in sites:
            if private_sizes.has_symbols(site.node.meta["val"]):
                raise DistributedError(
                    f"the gradient of {site.name} has no fixed size", advice="keep the sizes of parameters fixed"
                )
        reduce_sites(joint, [site for site in sites if site.is_inside], "step", settings)
        reduce_sites(joint, [site for site in sites if not site.is_inside], "backward", settings)
        check_parameters(joint)

    reduce_gradients.marks_gradients = True  # type: ignore[attr-defined]
    return reduce_gradients


def refuse_assumptions(joint: JointGraph) -> None:
    """Raise :class:`DistributedError` for a graph that checks assumptions about data: a rank where one fails runs eagerly."""
    node = next(filter(checks_assumption, joint.graph.nodes), None)
    if node is not None:
        raise DistributedError(
            "a size depends on the data, and where it is not such as the graph assumes, the call would run eagerly on this "
            "rank alone",
            where=node.meta.get("user_line"),
            advice="keep such operators out of the compiled function",
        )


def reduce_sites(joint: JointGraph, sites: list[GradientSite], phase: str, settings: Reduction) -> None:
    """Put the exchange of these gradients into a graph."""
    buckets = make_buckets(joint, sites, settings.bucket_bytes)
    if buckets:
        plan = Plan(phase, tuple(map(str, buckets))) if settings.check else None
        device = buckets[0].nodes[0].meta["val"].device
        Phase(joint, phase, settings.team, settings.kind, plan, device).exchange(buckets)


def _broadcast_buffers(joint: JointGraph, settings: Reduction) -> None:
    """Give buffers that are written to the first rank's value, in front of everything that reads them."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    buffers = [
        (node, descriptor.fqn)
        for node, descriptor in zip(placeholders, joint.input_descriptors, strict=True)
        if isinstance(descriptor, BufferInput) and MutatedInput(descriptor) in joint.output_descriptors
    ]
    if not buffers:
        return
    steps = tuple(f"broadcast {name}:{describe(node.meta['val'])}" for node, name in buffers)
    plan = Plan("buffers", steps) if settings.check else None
    phase = Phase(joint, "forward", settings.team, "", plan, placeholders[-1].meta["val"].device)
    call = phase.insert.after(phase.start)
    groups: dict[tuple[torch.dtype, torch.device], list[torch.fx.Node]] = {}
    for node, _ in buffers:
        value = node.meta["val"]
        groups.setdefault((real_dtype(value), value.device), []).append(node)
    for (dtype, _), nodes in groups.items():
        readers = {node: set(node.users) for node in nodes}
        packed = pack(call, nodes, phase.tokens(call, dtype))
        begun = call(collectives.broadcast.default, packed, 0, settings.team.name)
        pieces = unpack(call, call(collectives.wait_tensor.default, begun), nodes)
        for node, piece in zip(nodes, pieces, strict=True):
            node.replace_all_uses_with(piece, delete_user_cb=readers[node].__contains__)
