"""Exchanges between ranks as nodes of a graph.

A :class:`Site` is a tensor that is exchanged, a :class:`Bucket` has the sites of one collective, and a :class:`Phase` puts the
buckets of a forward, a backward or a whole step into a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import IN_BACKWARD
from dovetail.aot.tangents import FOR_PATTERN, MEMBER, PACK
from dovetail.distributed.operators import collectives, shard_rows
from dovetail.distributed.plan import Plan, agree, fingerprint, register
from dovetail.torch_private import tracing as private_tracing

#: ``call(target, *args, **kwargs)`` puts a node into a graph, see :class:`Inserter`.
Call = Callable[..., torch.fx.Node]
aten = torch.ops.aten


@dataclass(frozen=True)
class Team:
    """The ranks that exchange with each other: the name of their process group, and their number."""

    name: str
    size: int


#: The operator of each collective, and its arguments behind the tensor.
_COLLECTIVES: dict[str, tuple[Any, Callable[[Team], tuple[Any, ...]]]] = {
    "all_reduce": (collectives.all_reduce.default, lambda team: ("sum", team.name)),
    "reduce_scatter": (collectives.reduce_scatter_tensor.default, lambda team: ("sum", team.size, team.name)),
    "all_gather": (collectives.all_gather_into_tensor.default, lambda team: (team.size, team.name)),
    "broadcast": (collectives.broadcast.default, lambda team: (0, team.name)),
}


@dataclass(frozen=True)
class Reduction:
    """The ranks that exchange, the bytes of a bucket, "mean" or "sum" of gradients, and whether ranks check each other's plan."""

    team: Team
    bucket_bytes: int
    kind: str = "mean"
    check: bool = True


class Inserter:
    """Puts nodes into a joint graph.

    Those of the phase "backward" belong to the backward graph, those of other phases to the forward graph or to the only one.
    """

    def __init__(self, joint: JointGraph, phase: str) -> None:
        self.graph = joint.graph
        self.fake_mode = joint.fake_mode
        self.phase = phase

    def after(self, node: torch.fx.Node) -> Call:
        """A function whose nodes come one after the other behind ``node``."""
        last = node

        def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
            nonlocal last
            with self.graph.inserting_after(last):
                last = self._make(target, args, kwargs)
            return last

        return call

    def before(self, node: torch.fx.Node) -> Call:
        """A function whose nodes come one after the other in front of ``node``."""

        def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
            with self.graph.inserting_before(node):
                return self._make(target, args, kwargs)

        return call

    def _make(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["phase"] = "forward"
        if self.phase == "backward":
            node.meta["phase"] = "backward"
            # Marked even if no tangent reaches it: what the backward waits for must begin in the backward.
            node.meta[IN_BACKWARD] = True
        # The pass reads the shapes of nodes that it has just made.
        values = torch.fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
        with private_tracing.disable_current_modes(), self.fake_mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node


def places(joint: JointGraph) -> dict[torch.fx.Node, int]:
    """The position of each node in a graph."""
    return {node: place for place, node in enumerate(joint.graph.nodes)}


@dataclass(frozen=True, eq=False)
class Site:
    """A tensor in a graph that is exchanged: ``node`` computes what this rank gives, ``readers`` read what comes back.

    ``replace(new)`` makes them read another node. ``value`` is the tensor before it is scattered, or after it is gathered. ``mark``
    is the node whose place the exchange takes, where that is not ``node``.
    """

    name: str
    node: torch.fx.Node
    value: torch.Tensor
    readers: tuple[torch.fx.Node, ...]
    replace: Callable[[torch.fx.Node], None]
    mark: torch.fx.Node | None = None

    @classmethod
    def of_readers(cls, name: str, node: torch.fx.Node, value: torch.Tensor, read: torch.fx.Node) -> Site:
        """The site of a tensor that all present users of the node ``read`` will read."""
        readers = tuple(read.users)

        def replace(new: torch.fx.Node) -> None:
            read.replace_all_uses_with(new, delete_user_cb=readers.__contains__)

        return cls(name, node, value, readers, replace, read)

    @property
    def size(self) -> int:
        """The bytes of the tensor's elements."""
        return int(self.value.numel()) * self.value.element_size()

    def __str__(self) -> str:
        tensor = f"{str(self.value.dtype).removeprefix('torch.')}{list(self.value.shape)}"
        return f"{self.name}:{tensor}" if self.name else tensor


@dataclass
class Bucket:
    """Tensors that one collective exchanges."""

    collective: str
    #: The first node that reads one of them.
    reader: torch.fx.Node
    sites: list[Site] = field(default_factory=list)
    size: int = 0

    def last(self, order: dict[torch.fx.Node, int]) -> torch.fx.Node:
        """The node that computes the last of the tensors."""
        return max((site.node for site in self.sites), key=order.__getitem__)

    def __str__(self) -> str:
        return f"{self.collective} {', '.join(map(str, self.sites))}"


def make_buckets(
    joint: JointGraph,
    sites: Iterable[Site],
    bucket_bytes: int,
    collective: str = "all_reduce",
    known: Callable[[Site], int] | None = None,
) -> list[Bucket]:
    """Put tensors together, in order: at most ``bucket_bytes`` each (a larger one by itself), of one dtype and device.

    No bucket waits for a tensor that is computed (or ``known``) behind the first reader of another one in it.
    """
    order = places(joint)
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for site in sites:
        reader = min(site.readers, key=order.__getitem__)
        available = order[site.node] if known is None else known(site)
        key = site.value.dtype, site.value.device
        bucket = open_buckets.get(key)
        if bucket is None or bucket.size + site.size > bucket_bytes or order[bucket.reader] <= available:
            bucket = open_buckets[key] = Bucket(collective, reader)
            buckets.append(bucket)
        bucket.reader = min(bucket.reader, reader, key=order.__getitem__)
        bucket.sites.append(site)
        bucket.size += site.size
    return buckets


class Phase:
    """Puts the exchanges of one phase ("forward", "backward", or "step" for a graph that is both) into a graph.

    With a check the phase begins by asking whether all ranks have its plan; the answer is awaited in front of the first exchange.
    The calling tree::

        exchange             begins each bucket behind its last tensor
        +-- put              packs, begins, awaits and hands back a bucket
            +-- _table
            +-- _tokens      waits for the answer of the other ranks
            +-- _shaped
    """

    def __init__(
        self,
        joint: JointGraph,
        name: str,
        settings: Reduction,
        steps: Sequence[Bucket | str],
        behind: torch.fx.Node | None = None,
    ) -> None:
        """Begin a phase that exchanges ``steps``: buckets, and descriptions of what is exchanged beside them."""
        self._joint = joint
        self._settings = settings
        self._team = settings.team
        self._plan = Plan(name, tuple(map(str, steps)))
        self.insert = Inserter(joint, name)
        #: Behind this node the exchange of an input may begin.
        self.start = behind or joint.graph.find_nodes(op="placeholder")[-1]
        self._asked: torch.fx.Node | None = None
        if settings.check and steps:
            plan = self._plan
            devices = [step.sites[0].value.device for step in steps if isinstance(step, Bucket)]
            call = self.insert.after(self.start)
            own = call(fingerprint, register(plan), devices[0] if devices else self.start.meta["val"].device)
            own.meta[FOR_PATTERN] = lambda args, defined: (register(plan.for_tangents(defined)), *args[1:])
            self.start = self._asked = call(collectives.all_reduce.default, own, "max", self._team.name)

    def _tokens(self, call: Call, dtype: torch.dtype) -> list[torch.fx.Node]:
        """An empty tensor that exists only if all ranks have the plan: what is packed with it is exchanged after the check.

        Each bucket has a token of its own: a backward for some of the outputs leaves buckets out.
        """
        asked, plan = self._asked, self._plan
        if asked is None:
            return []
        greatest = next((user for user in asked.users if user.target is collectives.wait_tensor.default), None)
        if greatest is None:
            greatest = call(collectives.wait_tensor.default, asked)
        token = call(agree, greatest, plan.fingerprint, self._team.size, self._team.name, dtype)
        token.meta[FOR_PATTERN] = lambda args, defined: (args[0], plan.for_tangents(defined).fingerprint, *args[2:])
        return [token]

    def exchange(self, buckets: Iterable[Bucket]) -> None:
        """Begin each bucket behind its last tensor, and wait for it in front of the first reader."""
        order = places(self._joint)
        for bucket in sorted(buckets, key=lambda item: order[item.last(order)]):
            last = bucket.last(order)
            is_input = last.op == "placeholder"
            begun = self.put(bucket, self.insert.after(self.start if is_input else last))
            if is_input:
                self.start = begun

    def put(self, bucket: Bucket, behind: Call) -> torch.fx.Node:
        """Add the exchange of a bucket: packed and begun by ``behind``, awaited in front of the first reader.

        A tensor that is scattered or gathered is a table with a row for each rank; the tables are packed side by side. Returns
        the node that begins the exchange.
        """
        ahead = self.insert.before(bucket.reader)
        size = self._team.size
        rows = size if bucket.collective == "reduce_scatter" else 1
        tables = [_table(behind, site.node, rows) for site in bucket.sites]
        packed = behind(aten.cat.default, [*tables, *self._tokens(behind, tables[0].meta["val"].dtype)], 1)
        packed.meta[PACK] = True
        flat = behind(aten.view.default, packed, [packed.meta["val"].numel()])
        if self._settings.kind == "mean" and "reduce" in bucket.collective:
            flat = behind(aten.div.Tensor, flat, size)
        operator, arguments = _COLLECTIVES[bucket.collective]
        begun = behind(operator, flat, *arguments(self._team))
        done = ahead(collectives.wait_tensor.default, begun)
        rows = size if bucket.collective == "all_gather" else 1
        done = ahead(aten.view.default, done, [rows, done.meta["val"].numel() // rows])
        start = 0
        for number, (site, table) in enumerate(zip(bucket.sites, tables, strict=True)):
            length = table.meta["val"].shape[1]
            piece = ahead(aten.slice.Tensor, done, 1, start, start + length)
            start += length
            if len(tables) > 1:
                # It may become a .grad, which is written to by itself.
                piece = ahead(aten.clone.default, piece, memory_format=torch.contiguous_format)
            piece = self._shaped(ahead, piece, bucket.collective, site.value)
            piece.meta[MEMBER] = number
            site.replace(piece)
        return begun

    def _shaped(self, call: Call, piece: torch.fx.Node, collective: str, value: torch.Tensor) -> torch.fx.Node:
        """A piece of what has been exchanged, with the shape in which it is read."""
        shape = list(value.shape)
        if collective in ("reduce_scatter", "all_gather"):
            shape[0] = shard_rows(shape[0], self._team.size)
        if collective == "all_gather":
            shape[0] *= self._team.size
        whole = call(aten.view.default, piece, [*shape, 2] if value.is_complex() else shape)
        if value.is_complex():
            whole = call(aten.view_as_complex.default, whole)
        if collective == "all_gather" and shape[0] != value.shape[0]:
            whole = call(aten.slice.Tensor, whole, 0, 0, value.shape[0])
        return whole


def _table(call: Call, tensor: torch.fx.Node, rows: int) -> torch.fx.Node:
    """The real numbers of a tensor as a table; where it has more than one row, zeros fill it up."""
    value = tensor.meta["val"]
    if value.is_complex():
        tensor = call(aten.view_as_real.default, tensor)
    missing = shard_rows(value.shape[0], rows) * rows - value.shape[0] if rows > 1 else 0
    if missing:
        dims = tensor.meta["val"].dim()
        tensor = call(aten.constant_pad_nd.default, tensor, [0, 0] * (dims - 1) + [0, missing])
    if not tensor.meta["val"].is_contiguous():
        tensor = call(aten.clone.default, tensor, memory_format=torch.contiguous_format)
    return call(aten.view.default, tensor, [rows, tensor.meta["val"].numel() // rows])
