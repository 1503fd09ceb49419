"""Gradients that are exchanged together, and the exchanges of one phase of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.tangents import MEMBER, PACK
from dovetail.distributed.exchange import (
    Agreement,
    Call,
    Inserter,
    Team,
    collectives,
    describe,
    element_bytes,
    pack,
    places,
    real_dtype,
    unpack,
)
from dovetail.distributed.gradients import GradientSite
from dovetail.distributed.operators import shard_rows
from dovetail.distributed.plan import Plan

aten = torch.ops.aten


@dataclass
class Bucket:
    """Gradients that one collective, "all_reduce" or "reduce_scatter", exchanges."""

    collective: str
    sites: list[GradientSite] = field(default_factory=list)
    size: int = 0

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """The nodes that compute the gradients."""
        return [site.node for site in self.sites]

    @property
    def readers(self) -> list[torch.fx.Node]:
        """The nodes that read a gradient of the bucket."""
        return [reader for site in self.sites for reader in site.readers]

    def __str__(self) -> str:
        tensors = [":".join(filter(None, (site.name, describe(site.node.meta["val"])))) for site in self.sites]
        return f"{self.collective} {', '.join(tensors)}"


def make_buckets(
    joint: JointGraph, sites: list[GradientSite], bucket_bytes: int, collective: str = "all_reduce"
) -> list[Bucket]:
    """Put gradients together, in order: at most ``bucket_bytes`` each (a larger gradient by itself), of one dtype and device.

    No bucket waits for a gradient that is computed behind the first reader of another one in it.
    """
    order = places(joint)
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    closed: list[Bucket] = []
    for site in sites:
        value = site.node.meta["val"]
        key = (value.dtype, value.device)
        bucket = open_buckets.get(key)
        if bucket is not None:
            first_reader = min(map(order.__getitem__, bucket.readers), default=len(order))
            if bucket.size + element_bytes(value) > bucket_bytes or first_reader <= order[site.node]:
                closed.append(open_buckets.pop(key))
                bucket = None
        if bucket is None:
            bucket = open_buckets[key] = Bucket(collective)
        bucket.sites.append(site)
        bucket.size += element_bytes(value)
    closed += open_buckets.values()
    return sorted(closed, key=lambda item: max(map(order.__getitem__, item.nodes)))


class Phase:
    """Puts the exchanges of one phase ("forward", "backward", or "step" for a graph that is both) into a graph.

    With a plan the phase begins by asking whether all ranks have it. That takes as long as there is no gradient to exchange.
    """

    def __init__(
        self, joint: JointGraph, name: str, team: Team, reduction: str, plan: Plan | None, device: torch.device
    ) -> None:
        self._joint = joint
        self.team = team
        self._reduction = reduction
        self.insert = Inserter(joint, name)
        #: Behind this node the exchange of an input may begin.
        self.start = joint.graph.find_nodes(op="placeholder")[-1]
        self._agreement: Agreement | None = None
        if plan is not None and plan.steps:
            self._agreement = Agreement.ask(self.insert.after(self.start), team, plan, device)
            self.start = self._agreement.asked

    def tokens(self, call: Call, dtype: torch.dtype) -> list[torch.fx.Node]:
        """Tensors to be packed with the others of an exchange, so that it waits for the check of the plan."""
        return [] if self._agreement is None else [self._agreement.token(call, dtype)]

    def exchange(self, buckets: Iterable[Bucket]) -> None:
        """Begin each bucket behind its last gradient, and wait for it in front of the first reader."""
        order = places(self._joint)
        for bucket in sorted(buckets, key=lambda item: max(map(order.__getitem__, item.nodes))):
            last = max(bucket.nodes, key=order.__getitem__)
            behind = self.insert.after(last if last.op != "placeholder" else self.start)
            ahead = self.insert.before(min(bucket.readers, key=order.__getitem__))
            reduce = self._all_reduce if bucket.collective == "all_reduce" else self._reduce_scatter
            for site, piece in zip(bucket.sites, reduce(behind, ahead, bucket.nodes), strict=True):
                site.replace(piece)

    def _mean(self, call: Call, flat: torch.fx.Node) -> torch.fx.Node:
        return call(aten.div.Tensor, flat, self.team.size) if self._reduction == "mean" else flat

    def _all_reduce(self, behind: Call, ahead: Call, gradients: list[torch.fx.Node]) -> list[torch.fx.Node]:
        flat = pack(behind, gradients, self.tokens(behind, real_dtype(gradients[0].meta["val"])))
        begun = behind(collectives.all_reduce.default, self._mean(behind, flat), "sum", self.team.name)
        return unpack(ahead, ahead(collectives.wait_tensor.default, begun), gradients)

    def _reduce_scatter(self, behind: Call, ahead: Call, gradients: list[torch.fx.Node]) -> list[torch.fx.Node]:
        """Each gradient is a table with a row for each rank; the tables are packed side by side."""
        size = self.team.size
        tables = [_table(behind, gradient, size) for gradient in gradients]
        tokens = self.tokens(behind, gradients[0].meta["val"].dtype)
        packed = behind(aten.cat.default, [*tables, *tokens], 1)
        packed.meta[PACK] = True
        flat = behind(aten.view.default, packed, [packed.meta["val"].numel()])
        begun = behind(collectives.reduce_scatter_tensor.default, self._mean(behind, flat), "sum", size, self.team.name)
        done = ahead(collectives.wait_tensor.default, begun)
        pieces, start = [], 0
        for gradient, table in zip(gradients, tables, strict=True):
            value = gradient.meta["val"]
            length = table.meta["val"].shape[1]
            piece = ahead(aten.slice.Tensor, done, 0, start, start + length)
            pieces.append(ahead(aten.view.default, piece, [shard_rows(value.shape[0], size), *value.shape[1:]]))
            if len(gradients) > 1:
                pieces[-1] = ahead(aten.clone.default, pieces[-1])
            pieces[-1].meta[MEMBER] = len(pieces) - 1
            start += length
        return pieces


def _table(call: Call, gradient: torch.fx.Node, size: int) -> torch.fx.Node:
    """A gradient with as many rows as there are ranks, filled up with zeros."""
    value = gradient.meta["val"]
    missing = shard_rows(value.shape[0], size) * size - value.shape[0]
    if missing:
        gradient = call(aten.constant_pad_nd.default, gradient, [0, 0] * (value.dim() - 1) + [0, missing])
    if not gradient.meta["val"].is_contiguous():
        gradient = call(aten.clone.default, gradient, memory_format=torch.contiguous_format)
    return call(aten.view.default, gradient, [size, gradient.meta["val"].numel() // size])
