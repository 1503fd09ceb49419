"""The pass of data-parallel training: every rank has all parameters, and the gradients are reduced over the ranks.

Gradients are put together in buckets, in the order in which the graph computes them. A bucket's exchange begins right behind its
last gradient, and is awaited right in front of the first operator that reads one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dovetail.aot.descriptors import BufferInput, MutatedInput
from dovetail.aot.joint_graph import JointGraph, assumes
from dovetail.distributed.exchange import (
    Inserter,
    Team,
    begin_agreement,
    collectives,
    element_bytes,
    end_agreement,
    pack,
    real_dtype,
    unpack,
)
from dovetail.distributed.gradients import GradientSite, defer_readers, gradient_sites, is_marked, merge_accumulated
from dovetail.distributed.placement import check_parameters
from dovetail.distributed.plan import Plan
from dovetail.errors import DistributedError
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.gradient_marks import EXCHANGE, GRADIENT_OF

aten = torch.ops.aten


@dataclass
class Bucket:
    """Gradients that are exchanged together."""

    sites: list[GradientSite] = field(default_factory=list)
    size: int = 0

    def __str__(self) -> str:
        return "all_reduce " + ", ".join(describe(site.name, site.node.meta["val"]) for site in self.sites)


@dataclass(frozen=True)
class _Settings:
    """What a pass was asked for."""

    team: Team
    bucket_bytes: int
    reduction: str
    check: bool


def describe(name: str, value: torch.Tensor) -> str:
    """A tensor in one word, the same on all ranks."""
    return f"{name}:{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def device_of(buckets: list[Bucket]) -> torch.device:
    """Where the first exchange takes place."""
    value: torch.Tensor = buckets[0].sites[0].node.meta["val"]
    return value.device


def make_buckets(joint: JointGraph, sites: list[GradientSite], bucket_bytes: int) -> list[Bucket]:
    """Put gradients together, in order: at most ``bucket_bytes`` each (a larger gradient has its own), of one dtype and device.

    No bucket waits for a gradient that is computed behind the first reader of another one in it.
    """
    order = {node: place for place, node in enumerate(joint.graph.nodes)}
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    closed: list[Bucket] = []
    for site in sites:
        value = site.node.meta["val"]
        key = (value.dtype, value.device)
        bucket = open_buckets.get(key)
        if bucket is not None:
            first_reader = min((order[reader] for item in bucket.sites for reader in item.readers), default=len(order))
            if bucket.size + element_bytes(value) > bucket_bytes or first_reader <= order[site.node]:
                closed.append(open_buckets.pop(key))
                bucket = None
        if bucket is None:
            bucket = open_buckets[key] = Bucket()
        bucket.sites.append(site)
        bucket.size += element_bytes(value)
    closed += open_buckets.values()
    return sorted(closed, key=lambda item: max(order[site.node] for site in item.sites))


def replicate(
    team: Team, *, bucket_bytes: int = 25 << 20, reduction: str = "mean", check: bool = True, buffers: bool = True
) -> Callable[[JointGraph], None]:
    """A pass: the gradients of all parameters are reduced over the ranks of ``team``.

    ``reduction`` is "mean" or "sum". With ``check`` the ranks make sure at each call that they exchange the same things. With
    ``buffers`` a buffer that the graph writes to (the running mean of a batch norm) has at each call the first rank's value.
    """
    settings = _Settings(team, bucket_bytes, reduction, check)

    def reduce_gradients(joint: JointGraph) -> None:
        refuse_guesses(joint)
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
        _reduce(joint, [site for site in sites if site.is_inside], "step", settings)
        _reduce(joint, [site for site in sites if not site.is_inside], "backward", settings)
        check_parameters(joint)

    reduce_gradients.marks_gradients = True  # type: ignore[attr-defined]
    return reduce_gradients


def refuse_guesses(joint: JointGraph) -> None:
    """Raise :class:`DistributedError` for a graph that may find out that the data does not fit: such a call runs eagerly."""
    guess = next(filter(assumes, joint.graph.nodes), None)
    if guess is not None:
        raise DistributedError(
            "a size depends on the data, and where it is not such as the graph assumes, the call would run eagerly on this "
            "rank alone",
            where=guess.meta.get("user_line"),
            advice="keep such operators out of the compiled function",
        )


def _reduce(joint: JointGraph, sites: list[GradientSite], phase: str, settings: _Settings) -> None:
    found = make_buckets(joint, sites, settings.bucket_bytes)
    if not found:
        return
    order = {node: place for place, node in enumerate(joint.graph.nodes)}
    last_input = joint.graph.find_nodes(op="placeholder")[-1]
    insert = Inserter(joint, phase)
    plan = Plan(phase, tuple(map(str, found)))
    # It begins with the phase, and is over by the time that there is a gradient to exchange.
    asked = begin_agreement(insert.after(last_input), plan, settings.team, device_of(found)) if settings.check else None
    for bucket in found:
        parts = [site.node for site in bucket.sites]
        last = max(parts, key=order.__getitem__)
        behind = insert.after(last if last.op != "placeholder" else asked or last_input)
        token = None
        if asked is not None:
            token = end_agreement(behind, asked, plan, settings.team, real_dtype(parts[0].meta["val"]))
        flat = pack(behind, parts, token)
        if settings.reduction == "mean":
            flat = behind(aten.div.Tensor, flat, settings.team.size)
        begun = behind(collectives.all_reduce.default, flat, "sum", settings.team.name)
        readers = [reader for site in bucket.sites for reader in site.readers]
        ahead = insert.before(min(readers, key=order.__getitem__))
        done = ahead(collectives.wait_tensor.default, begun)
        for site, piece in zip(bucket.sites, unpack(ahead, done, parts), strict=True):
            site.replace(piece)


def reduce_sites(joint: JointGraph, sites: list[GradientSite], phase: str, team: Team, bucket_bytes: int) -> None:
    """Put the exchange of some gradients into a graph: their mean."""
    _reduce(joint, sites, phase, _Settings(team, bucket_bytes, "mean", True))


def _broadcast_buffers(joint: JointGraph, settings: _Settings) -> None:
    """Give buffers that are written to the first rank's value, in front of everything that reads them."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    buffers = [
        (node, descriptor)
        for node, descriptor in zip(placeholders, joint.input_descriptors, strict=True)
        if isinstance(descriptor, BufferInput) and MutatedInput(descriptor) in joint.output_descriptors
    ]
    if not buffers:
        return
    steps = tuple(f"broadcast {describe(item.fqn, node.meta['val'])}" for node, item in buffers)
    plan = Plan("buffers", steps)
    call = Inserter(joint, "forward").after(placeholders[-1])
    groups: dict[tuple[torch.dtype, torch.device], list[torch.fx.Node]] = {}
    for node, _ in buffers:
        value = node.meta["val"]
        groups.setdefault((real_dtype(value), value.device), []).append(node)
    asked = begin_agreement(call, plan, settings.team, placeholders[-1].meta["val"].device) if settings.check else None
    for (dtype, _), nodes in groups.items():
        readers = {node: set(node.users) for node in nodes}
        token = None if asked is None else end_agreement(call, asked, plan, settings.team, dtype)
        begun = call(collectives.broadcast.default, pack(call, nodes, token), 0, settings.team.name)
        pieces = unpack(call, call(collectives.wait_tensor.default, begun), nodes)
        for node, piece in zip(nodes, pieces, strict=True):
            node.replace_all_uses_with(piece, delete_user_cb=readers[node].__contains__)
