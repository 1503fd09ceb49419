"""The pass of sharded training: parameters are gathered in buckets ahead of their use, gradients scattered early.

A graph gets this pass by itself where it holds the operators of :mod:`dovetail.distributed.operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.aot.joint_graph import IN_BACKWARD, JointGraph, must_stay
from dovetail.aot.required_passes import register_required_pass
from dovetail.aot.tangents import MEMBER, PACK
from dovetail.distributed.exchange import (
    Inserter,
    Team,
    begin_agreement,
    collectives,
    element_bytes,
    end_agreement,
    unpack,
)
from dovetail.distributed.gradients import GradientSite, defer_readers, merge_exchanges
from dovetail.distributed.operators import gather, part_rows, reduce, replica, scatter
from dovetail.distributed.parts import reduce_wholes, team_of
from dovetail.distributed.placement import check_parameters
from dovetail.distributed.plan import Plan
from dovetail.distributed.replicate import Bucket, make_buckets, refuse_guesses
from dovetail.errors import DistributedError
from dovetail.torch_private import sizes as private_sizes

aten = torch.ops.aten
VIEWS = frozenset(
    {"t", "transpose", "permute", "view", "_unsafe_view", "detach", "alias", "expand", "unsqueeze", "squeeze"}
)


@dataclass(frozen=True)
class ShardingOptions:
    """``bucket_bytes``: how many bytes are exchanged together. ``gather_again``: parameters are not kept for the backward, but
    gathered again in it (but for those of the last bucket). ``check``: ranks make sure that they exchange the same things.
    """

    bucket_bytes: int = 25 << 20
    gather_again: bool = True
    check: bool = True


def is_sharded(joint: JointGraph) -> bool:
    """Whether a graph reads parameters that are spread over ranks."""
    return any(node.target in (gather, scatter, replica, reduce) for node in joint.graph.nodes)


def spread_parameters(options: ShardingOptions | None = None) -> Callable[[JointGraph], None]:
    """A pass: the exchanges of a sharded module are put together in buckets and run beside the computation."""
    chosen = options if options is not None else ShardingOptions()

    def lower(joint: JointGraph) -> None:
        refuse_guesses(joint)
        nodes = [node for node in joint.graph.nodes if node.target in (gather, scatter, replica, reduce)]
        teams = {(team_of(node), str(node.args[-1])): None for node in nodes}
        if len(teams) > 1:
            raise DistributedError(
                "modules that are sharded in different ways meet in one graph", advice="compile a step for each of them"
            )
        for node in nodes:
            if private_sizes.has_symbols(node.meta["val"]):
                raise DistributedError(
                    "a sharded parameter has no fixed size", advice="keep the sizes of parameters fixed"
                )
        is_whole = any(node.target in (gather, replica) and not node.args[-4] for node in nodes)
        leaves = is_whole and _gradients_leave(joint, nodes)
        if teams:
            _Lowering(joint, *next(iter(teams)), chosen).run()
        if leaves:
            raise DistributedError(
                "gradients of a sharded module leave the graph, and what is computed from them elsewhere (a norm, say) is not "
                "that of the whole",
                advice="compile the whole step as one graph (fullgraph=True), or say shard(..., eager_optimizer=True)",
            )
        check_parameters(joint)

    return lower


def _gradients_leave(joint: JointGraph, nodes: list[torch.fx.Node]) -> bool:
    """Whether gradients are computed, and what uses them is not in this graph, where it could be watched."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    parts = {node.args[0] for node in nodes if node.target in (gather, replica)}
    is_updated = any(placeholders[item.input_index] in parts for item in joint.spec.mutations)
    is_broken = getattr(joint.capture, "resume_point", None) is not None
    return any(node.target in (scatter, reduce) for node in nodes) and (is_broken or not is_updated)


register_required_pass(is_sharded, spread_parameters())


@dataclass
class _Gathered:
    """The nodes ``wholes`` are gathered together; ``reader`` is the first that reads one of them."""

    reader: torch.fx.Node
    wholes: list[torch.fx.Node] = field(default_factory=list)
    size: int = 0

    def __str__(self) -> str:
        return "all_gather " + ", ".join(_describe(node) for node in self.wholes)


def _describe(node: torch.fx.Node) -> str:
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


class _Lowering:
    """One run of the pass."""

    def __init__(self, joint: JointGraph, team: Team, reduction: str, options: ShardingOptions) -> None:
        self.joint = joint
        self.team = team
        self.options = options
        self.reduction = reduction
        self._token: tuple[torch.fx.Node, Plan] | None = None
        self.has_backward = len(joint.input_descriptors) > joint.num_primals

    def run(self) -> None:
        """Take the operators apart."""
        joint = self.joint
        joint.graph.eliminate_dead_code(is_impure_node=must_stay)
        for node in joint.graph.find_nodes(op="call_function", target=replica):
            # The whole is there: all that the operator is for is the gradient's exchange.
            node.target, node.args = aten.clone.default, node.args[:1]
        merge_exchanges(joint, (scatter, reduce))
        if not self.has_backward:
            defer_readers(joint, lambda node: node.target in (scatter, reduce))
        norms = reduce_wholes(joint, self.team)
        forward, backward = self._gathers()
        scattered = self._sites(scatter)
        reduced = self._sites(reduce)
        steps = [str(item) for item in forward], [str(item) for item in backward]
        late = [f"reduce_scatter {item}" for item in map(str, scattered)] + list(map(str, reduced))
        if self.has_backward:
            self._gather(forward, [*steps[0], *norms], "forward")
            self._token = None
            backward = self._bucketed(node for item in backward for node in item.wholes)
            self._gather(backward, [*steps[1], *late], "backward")
            self._exchange(scattered, reduced, "backward")
        else:
            last_forward = forward[-1].reader if forward else None
            self._gather(forward, [*steps[0], *steps[1], *late, *norms], "step")
            self._gather(self._bucketed(node for item in backward for node in item.wholes), [], "step", last_forward)
            self._exchange(scattered, reduced, "step")

    def _order(self) -> dict[torch.fx.Node, int]:
        return {node: place for place, node in enumerate(self.joint.graph.nodes)}

    def _inputs_end(self) -> torch.fx.Node:
        return self.joint.graph.find_nodes(op="placeholder")[-1]

    # Gathering.

    def _gathers(self) -> tuple[list[_Gathered], list[_Gathered]]:
        """What is gathered for the forward, and what again for the backward."""
        first: dict[Any, torch.fx.Node] = {}
        for node in self.joint.graph.find_nodes(op="call_function", target=gather):
            same = first.setdefault(node.args, node)
            if same is not node:
                node.replace_all_uses_with(same)
                self.joint.graph.erase_node(node)
        forward = self._bucketed(first.values())
        if not self.options.gather_again:
            return forward, []
        order = self._order()
        boundary = order[forward[-1].reader] if forward else 0
        dependent = self._dependent()
        again = []
        for bucket in forward[:-1]:
            for whole in bucket.wholes:
                is_late = dependent.__contains__ if self.has_backward else lambda node: order.get(node, -1) > boundary
                copy = self._gather_again(whole, is_late)
                again += [copy] if copy is not None else []
        return forward, self._bucketed(again)

    def _dependent(self) -> set[torch.fx.Node]:
        found = set(self.joint.graph.find_nodes(op="placeholder")[self.joint.num_primals :])
        for node in self.joint.graph.nodes:
            if node.op == "call_function" and (
                node.meta.get(IN_BACKWARD) or any(argument in found for argument in node.all_input_nodes)
            ):
                found.add(node)
        return found

    def _gather_again(self, whole: torch.fx.Node, is_late: Callable[[torch.fx.Node], bool]) -> torch.fx.Node | None:
        """A second gather for late readers of a parameter or of a view of it; None if there are none."""
        graph = self.joint.graph
        early = [whole]
        for node in early:
            early += [user for user in node.users if getattr(user.target, "_opname", "") in VIEWS and not is_late(user)]
        order = self._order()
        known = set(early)
        readers = {user for node in early for user in node.users if user not in known and is_late(user)}
        late = sorted((reader for reader in readers if reader.op != "output"), key=order.__getitem__)
        if not late:
            return None
        copies: dict[torch.fx.Node, torch.fx.Node] = {}

        def copy(node: torch.fx.Node) -> torch.fx.Node:
            if node not in copies:
                arguments = torch.fx.node.map_arg(
                    (node.args, node.kwargs), lambda item: copy(item) if item in known else item
                )
                with graph.inserting_before(late[0]):
                    copies[node] = graph.call_function(node.target, *arguments)  # type: ignore[arg-type]
                copies[node].meta = {**node.meta, "phase": "backward"}
                if self.has_backward:
                    copies[node].meta[IN_BACKWARD] = True
                copies[node].meta.pop("signature", None)
            return copies[node]

        with graph.inserting_before(late[0]):
            second = graph.call_function(gather, whole.args)
        second.meta = {**whole.meta, "phase": "backward"}
        second.meta.pop("signature", None)
        if self.has_backward:
            second.meta[IN_BACKWARD] = True
        copies[whole] = second
        for reader in late:
            for argument in reader.all_input_nodes:
                if argument in known:
                    reader.replace_input_with(argument, copy(argument))
        return second

    def _bucketed(self, nodes: Iterable[torch.fx.Node]) -> list[_Gathered]:
        order = self._order()
        firsts = {node: min(node.users, key=order.__getitem__) for node in nodes}
        buckets: list[_Gathered] = []
        last: dict[Any, _Gathered] = {}
        for node in sorted(firsts, key=lambda node: order[firsts[node]]):
            value = node.meta["val"]
            part: Any = node.args[0]
            key = value.dtype, value.device
            bucket = last.get(key)
            too_late = bucket is not None and part.op != "placeholder" and order[part] >= order[bucket.reader]
            if bucket is None or too_late or bucket.size + element_bytes(value) > self.options.bucket_bytes:
                bucket = last[key] = _Gathered(firsts[node])
                buckets.append(bucket)
            bucket.wholes.append(node)
            bucket.size += element_bytes(value)
        return buckets

    def _gather(
        self, buckets: list[_Gathered], steps: list[str], phase: str, earliest: torch.fx.Node | None = None
    ) -> None:
        """Begin each bucket when the one before is first read, and wait where it is first read itself."""
        insert = Inserter(self.joint, phase)
        if steps and self.options.check:
            plan = Plan(phase, tuple(steps))
            call = insert.after(self._inputs_end())
            asked = begin_agreement(call, plan, self.team, self._inputs_end().meta["val"].device)
            self._token = (asked, plan)
        order = self._order()
        for place, bucket in enumerate(buckets):
            parts: list[Any] = [node.args[0] for node in bucket.wholes]
            start = buckets[place - 1].reader if place else earliest
            newest = max(parts, key=order.__getitem__)
            if newest.op != "placeholder" and (start is None or order[newest] >= order[start]):
                begin = insert.after(newest)
            elif start is not None:
                begin = insert.before(start)
            else:
                begin = insert.after(self._token[0] if self._token is not None else self._inputs_end())
            flat_parts = [begin(aten.view.default, part, [part.meta["val"].numel()]) for part in parts]
            dtype = parts[0].meta["val"].dtype
            flat = begin(aten.cat.default, [*flat_parts, *self._agreed(begin, dtype)])
            begun = begin(collectives.all_gather_into_tensor.default, flat, self.team.size, self.team.name)
            ahead = insert.before(bucket.reader)
            done = ahead(collectives.wait_tensor.default, begun)
            table = ahead(aten.view.default, done, [self.team.size, flat.meta["val"].numel()])
            at = 0
            for node, part in zip(bucket.wholes, parts, strict=True):
                value = node.meta["val"]
                length = part.meta["val"].numel()
                piece = ahead(aten.slice.Tensor, table, 1, at, at + length)
                at += length
                if len(parts) > 1:
                    piece = ahead(aten.clone.default, piece, memory_format=torch.contiguous_format)
                rows = part.meta["val"].shape[0] * self.team.size
                whole = ahead(aten.view.default, piece, [rows, *value.shape[1:]])
                if rows != value.shape[0]:
                    whole = ahead(aten.slice.Tensor, whole, 0, 0, value.shape[0])
                node.replace_all_uses_with(whole)

    def _agreed(self, call: Callable[..., torch.fx.Node], dtype: torch.dtype) -> list[torch.fx.Node]:
        """The check that all ranks have this plan, in front of the first exchange."""
        if self._token is None:
            return []
        asked, plan = self._token
        return [end_agreement(call, asked, plan, self.team, dtype)]

    # Gradients.

    def _sites(self, target: Any) -> list[Bucket]:
        sites = []
        for node in self.joint.graph.find_nodes(op="call_function", target=target):
            source: Any = node.args[0]
            sites.append(
                GradientSite(_describe(source), source, tuple(node.users), node.replace_all_uses_with, is_inside=True)
            )
        order = self._order()
        sites.sort(key=lambda site: order[site.node])
        found = make_buckets(self.joint, sites, self.options.bucket_bytes)
        return found

    def _exchange(self, scattered: list[Bucket], reduced: list[Bucket], phase: str) -> None:
        order = self._order()
        for bucket, is_scattered in sorted(
            [(item, True) for item in scattered] + [(item, False) for item in reduced],
            key=lambda item: max(order[site.node] for site in item[0].sites),
        ):
            parts = [site.node for site in bucket.sites]
            last = max(parts, key=order.__getitem__)
            insert = Inserter(self.joint, phase)
            asked = self._token[0] if self._token is not None else self._inputs_end()
            behind = insert.after(last if last.op != "placeholder" else asked)
            readers = [reader for site in bucket.sites for reader in site.readers]
            ahead = insert.before(min(readers, key=order.__getitem__))
            if is_scattered:
                pieces = self._scatter(behind, ahead, parts)
            else:
                pieces = self._reduce(behind, ahead, parts)
            for site, piece in zip(bucket.sites, pieces, strict=True):
                site.replace(piece)

    def _mean(self, call: Callable[..., torch.fx.Node], flat: torch.fx.Node) -> torch.fx.Node:
        return call(aten.div.Tensor, flat, self.team.size) if self.reduction == "mean" else flat

    def _scatter(self, behind: Any, ahead: Any, parts: list[torch.fx.Node]) -> list[torch.fx.Node]:
        size = self.team.size
        tables = []
        for part in parts:
            value = part.meta["val"]
            rows = part_rows(value.shape[0], size)
            missing = rows * size - value.shape[0]
            if missing:
                part = behind(aten.constant_pad_nd.default, part, [0, 0] * (value.dim() - 1) + [0, missing])
            if not part.meta["val"].is_contiguous():
                part = behind(aten.clone.default, part, memory_format=torch.contiguous_format)
            tables.append(behind(aten.view.default, part, [size, part.meta["val"].numel() // size]))
        dtype = parts[0].meta["val"].dtype
        packed = behind(aten.cat.default, [*tables, *self._agreed(behind, dtype)], 1)
        packed.meta[PACK] = True
        flat = behind(aten.view.default, packed, [packed.meta["val"].numel()])
        begun = behind(collectives.reduce_scatter_tensor.default, self._mean(behind, flat), "sum", size, self.team.name)
        done = ahead(collectives.wait_tensor.default, begun)
        pieces, at = [], 0
        for part, table in zip(parts, tables, strict=True):
            value = part.meta["val"]
            length = table.meta["val"].shape[1]
            piece = ahead(aten.slice.Tensor, done, 0, at, at + length)
            pieces.append(ahead(aten.view.default, piece, [part_rows(value.shape[0], size), *value.shape[1:]]))
            if len(parts) > 1:
                pieces[-1] = ahead(aten.clone.default, pieces[-1])
            pieces[-1].meta[MEMBER] = len(pieces) - 1
            at += length
        return pieces

    def _reduce(self, behind: Any, ahead: Any, parts: list[torch.fx.Node]) -> list[torch.fx.Node]:
        dtype = parts[0].meta["val"].dtype
        flat = behind(
            aten.cat.default, [behind(aten.view.default, part, [1]) for part in parts] + self._agreed(behind, dtype)
        )
        flat.meta[PACK] = True
        begun = behind(collectives.all_reduce.default, self._mean(behind, flat), "sum", self.team.name)
        return unpack(ahead, ahead(collectives.wait_tensor.default, begun), parts)
