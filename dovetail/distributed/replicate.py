"""The pass of data-parallel training: each rank has all parameters, and gradients are reduced over the ranks.

Gradients are put together in buckets, in the order in which the graph computes them. A bucket's exchange begins right behind its
last gradient, and is awaited right in front of the first operator that reads one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from dovetail.aot.descriptors import BufferInput, MutatedInput
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import checks_assumption
from dovetail.distributed.exchange import Phase, Reduction, Site, Team, make_buckets
from dovetail.distributed.gradients import defer_readers, gradient_sites, is_marked, merge_accumulated
from dovetail.distributed.placement import check_parameters
from dovetail.errors import DistributedError
from dovetail.rules.gradients.marks import EXCHANGE, GRADIENT_OF
from dovetail.torch_private import sizes as private_sizes


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
            reduce_sites(joint, list(_written_buffers(joint)), "buffers", settings, "broadcast")
        if any(GRADIENT_OF in node.meta for node in joint.graph.nodes):
            merge_accumulated(joint)
            defer_readers(joint, is_marked)
        sites = gradient_sites(joint)
        for site in sites:
            if private_sizes.has_symbols(site.node.meta["val"]):
                raise DistributedError(
                    f"the gradient of {site.name} has no fixed size", advice="keep the sizes of parameters fixed"
                )
        reduce_sites(joint, [site for site in sites if site.mark is not None], "step", settings)
        reduce_sites(joint, [site for site in sites if site.mark is None], "backward", settings)
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


def reduce_sites(
    joint: JointGraph,
    sites: Iterable[Site],
    phase: str,
    settings: Reduction,
    collective: str = "all_reduce",
    behind: torch.fx.Node | None = None,
) -> torch.fx.Node | None:
    """Put the exchange of these tensors into a graph; returns the node ``behind`` which another phase may begin."""
    buckets = make_buckets(joint, sites, settings.bucket_bytes, collective)
    if not buckets:
        return behind
    found = Phase(joint, phase, settings, buckets, behind)
    found.exchange(buckets)
    return found.start


def _written_buffers(joint: JointGraph) -> Iterator[Site]:
    """The buffers that a graph reads and writes to."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    for node, descriptor in zip(placeholders, joint.input_descriptors, strict=True):
        if isinstance(descriptor, BufferInput) and MutatedInput(descriptor) in joint.output_descriptors and node.users:
            yield Site.of_readers(descriptor.fqn, node, node.meta["val"], node)
