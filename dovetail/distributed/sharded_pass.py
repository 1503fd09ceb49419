"""The pass of sharded training: parameters are gathered in buckets ahead of their use, gradients scattered early.

A graph gets this pass by itself where it holds the operators of :mod:`dovetail.distributed.operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph, Pass
from dovetail.aot.nodes import IN_BACKWARD, must_stay
from dovetail.aot.steps import required_passes
from dovetail.distributed.exchange import Bucket, Phase, Reduction, Site, Team, make_buckets, places
from dovetail.distributed.gradients import defer_readers, merge_exchanges
from dovetail.distributed.operators import average, gather, reduce, replica, reshard, scatter, unshard
from dovetail.distributed.placement import check_parameters
from dovetail.distributed.replicate import refuse_assumptions
from dovetail.distributed.shards import reduce_wholes, team_of
from dovetail.errors import DistributedError
from dovetail.torch_private import sizes as private_sizes

aten = torch.ops.aten
VIEWS = frozenset(
    {"t", "transpose", "permute", "view", "_unsafe_view", "detach", "alias", "expand", "unsqueeze", "squeeze"}
)


#: What makes of this rank's part what it gives: other ranks, whose parts have other lengths, may do less.
_PREPARES = VIEWS | {"slice", "_to_copy", "new_zeros", "cat", "clone"}


def _prepared_from(nodes: Iterable[torch.fx.Node]) -> tuple[set[torch.fx.Node], set[torch.fx.Node]]:
    """The nodes that prepare what is given to an exchange, and the nodes that these begin with, on each rank the same ones."""
    chain, begins, found = set(), set(), list(nodes)
    for node in found:
        if node.op == "call_function" and getattr(node.target, "_opname", "") in _PREPARES:
            found += [item for item in node.all_input_nodes if item not in chain and item not in begins]
            chain.add(node)
        else:
            begins.add(node)
    return chain, begins


@dataclass(frozen=True)
class ShardingOptions:
    """``bucket_bytes``: how many bytes are exchanged together. ``gather_again``: parameters are not kept for the backward, but
    gathered again in it (except those of the last bucket). ``check``: ranks make sure that they exchange the same things.
    """

    bucket_bytes: int = 25 << 20
    gather_again: bool = True
    check: bool = True


_OPERATORS = (gather, scatter, replica, reduce)
#: The exchanges of FSDP.
_UNWATCHED = (unshard, reshard, average)


def exchange_shards(options: ShardingOptions | None = None) -> Callable[[JointGraph], None]:
    """A pass: the exchanges of a sharded module are put together in buckets and run beside the computation."""
    chosen = options if options is not None else ShardingOptions()

    def lower(joint: JointGraph) -> None:
        refuse_assumptions(joint)
        nodes = [node for node in joint.graph.nodes if node.target in _OPERATORS]
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
        must_not_leave = any(node.target in (gather, replica) and not node.args[-4] for node in nodes)
        leaves = must_not_leave and _gradients_leave(joint, nodes)
        if teams:
            _Lowering(joint, *next(iter(teams)), chosen).run()
        others = [node for node in joint.graph.nodes if node.target in _UNWATCHED]
        for team, reduction in dict.fromkeys((team_of(node), str(node.args[-1])) for node in others):
            _Lowering(joint, team, reduction, chosen, is_watched=False).run()
        if leaves:
            raise DistributedError(
                "gradients of a sharded module leave the graph, and what is computed from them elsewhere (a norm, say) is not "
                "that of the whole",
                advice="compile the whole step as one graph (fullgraph=True), or say shard(..., eager_optimizer=True)",
            )
        if nodes:
            check_parameters(joint)

    return lower


def _gradients_leave(joint: JointGraph, nodes: list[torch.fx.Node]) -> bool:
    """Whether gradients are computed in this graph and used outside of it, where they cannot be watched."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    shards = {node.args[0] for node in nodes if node.target in (gather, replica)}
    is_updated = any(placeholders[item.input_index] in shards for item in joint.spec.mutations)
    is_broken = joint.capture.resume_point is not None
    return any(node.target in (scatter, reduce) for node in nodes) and (is_broken or not is_updated)


@required_passes
def _exchange_shards(joint: JointGraph) -> Pass | None:
    return exchange_shards() if any(node.target in (*_OPERATORS, *_UNWATCHED) for node in joint.graph.nodes) else None


class _Lowering:
    """One run of the pass. The calling tree::

    run
    +-- merge_exchanges, reduce_wholes     fewer exchanges of gradients; norms and sums of the whole
    +-- _gathers                           buckets of parameters for the forward, and again for the backward
    |   +-- _gather_again
    +-- _scattered                         buckets of gradients
    +-- Phase                              asks whether all ranks have the plan
    +-- _gather                            begins each bucket of parameters when the one before is first read
    +-- Phase.exchange                     exchanges gradients
    """

    def __init__(
        self, joint: JointGraph, team: Team, reduction: str, options: ShardingOptions, is_watched: bool = True
    ) -> None:
        self.joint = joint
        self.team = team
        self.is_watched = is_watched
        self.gather, self.scatter, self.reduce = (gather, scatter, reduce) if is_watched else _UNWATCHED
        self.settings = Reduction(team, options.bucket_bytes, reduction, options.check)
        self.gather_again = options.gather_again
        self.has_backward = len(joint.input_descriptors) > joint.num_primals

    def run(self) -> None:
        """Replace the operators by collectives."""
        joint = self.joint
        joint.graph.eliminate_dead_code(is_impure_node=must_stay)
        for node in joint.graph.find_nodes(op="call_function", target=replica):
            # The whole is there already; the operator was needed for its derivative.
            node.target, node.args = aten.clone.default, node.args[:1]
        if self.is_watched:
            merge_exchanges(joint, (scatter, reduce))
        if not self.has_backward:
            defer_readers(joint, lambda node: node.target in (self.scatter, self.reduce))
        norms = reduce_wholes(joint, self.team) if self.is_watched else []
        forward, again = self._gathers()
        backward = self._bucketed(again)
        gradients = [*self._scattered(self.scatter, "reduce_scatter"), *self._scattered(self.reduce, "all_reduce")]
        if self.has_backward:
            self._gather(forward, Phase(joint, "forward", self.settings, [*forward, *norms]))
            phase = Phase(joint, "backward", self.settings, [*backward, *gradients])
            self._gather(self._bucketed(again), phase)
        else:
            last_forward = forward[-1].reader if forward else None
            phase = Phase(joint, "step", self.settings, [*forward, *backward, *gradients, *norms])
            self._gather(forward, phase)
            self._gather(self._bucketed(again), phase, last_forward)
        phase.exchange(gradients)

    def _calls(self, target: Any) -> list[torch.fx.Node]:
        """The calls of an operator by these ranks, with this reduction."""
        nodes = self.joint.graph.find_nodes(op="call_function", target=target)
        return [node for node in nodes if team_of(node) == self.team and node.args[-1] == self.settings.kind]

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _gathers(self) -> tuple[list[Bucket], list[torch.fx.Node]]:
        """The parameters that are gathered for the forward, and the gathers that are added for the backward."""
        first: dict[Any, torch.fx.Node] = {}
        for node in self._calls(self.gather):
            same = first.setdefault(node.args, node)
            if same is not node:
                node.replace_all_uses_with(same)
                self.joint.graph.erase_node(node)
        self._sink_views(first.values())
        forward = self._bucketed(first.values(), not self.is_watched)
        if not self.gather_again:
            return forward, []
        order = places(self.joint)
        boundary = order[forward[-1].reader] if forward else 0
        dependent = self._dependent()
        again: list[torch.fx.Node] = []
        for bucket in forward[:-1]:
            for whole in (site.mark for site in bucket.sites if site.mark is not None):
                if not self.is_watched and not whole.args[1]:
                    continue
                is_late = dependent.__contains__ if self.has_backward else lambda node: order.get(node, -1) > boundary
                copy = self._gather_again(whole, is_late)
                again += [copy] if copy is not None else []
        return forward, again

    def _sink_views(self, wholes: Iterable[torch.fx.Node]) -> None:
        """Move views of what is gathered to their readers: rows that fill up are cut off where a parameter is gathered."""
        order: dict[torch.fx.Node, float] = dict(places(self.joint))
        found = list(wholes)
        for node in found:
            found += [user for user in node.users if getattr(user.target, "_opname", "") in VIEWS | {"slice"}]
        for node in sorted(found, key=order.__getitem__, reverse=True):
            if node.target is not self.gather:
                first = min(node.users, key=order.__getitem__)
                first.prepend(node)
                order[node] = order[first] - 0.5

    def _dependent(self) -> set[torch.fx.Node]:
        """The nodes of the backward."""
        found = set(self.joint.graph.find_nodes(op="placeholder")[self.joint.num_primals :])
        for node in self.joint.graph.nodes:
            if node.op == "call_function" and (
                node.meta.get(IN_BACKWARD) or any(argument in found for argument in node.all_input_nodes)
            ):
                found.add(node)
        return found

    def _gather_again(self, whole: torch.fx.Node, is_late: Callable[[torch.fx.Node], bool]) -> torch.fx.Node | None:
        """A second gather for late readers of a parameter or of a view of it; None if there are none."""
        early = [whole]
        for node in early:
            early += [user for user in node.users if getattr(user.target, "_opname", "") in VIEWS and not is_late(user)]
        order = places(self.joint)
        known = set(early)
        readers = {user for node in early for user in node.users if user not in known and is_late(user)}
        late = sorted((reader for reader in readers if reader.op != "output"), key=order.__getitem__)
        if not late:
            return None
        copies: dict[torch.fx.Node, torch.fx.Node] = {}

        def copy(node: torch.fx.Node) -> torch.fx.Node:
            """The gather or view of it, again, in front of the late readers."""
            if node not in copies:
                given = (node.args, node.kwargs)
                if node is not whole:
                    given = torch.fx.node.map_arg(given, lambda item: copy(item) if item in known else item)  # type: ignore[assignment]
                with self.joint.graph.inserting_before(late[0]):
                    copies[node] = self.joint.graph.call_function(node.target, *given)  # type: ignore[arg-type]
                copies[node].meta = {**node.meta, "phase": "backward"}
                if self.has_backward:
                    copies[node].meta[IN_BACKWARD] = True
                copies[node].meta.pop("signature", None)
            return copies[node]

        second = copy(whole)
        for reader in late:
            for argument in reader.all_input_nodes:
                if argument in known:
                    reader.replace_input_with(argument, copy(argument))
        return second

    def _bucketed(self, wholes: Iterable[torch.fx.Node], apart: bool = False) -> list[Bucket]:
        """Put gathers together by their first readers; ``apart``: those only that the program has together too."""
        order = places(self.joint)
        sites = [Site.of_readers("", node.args[0], node.meta["val"], node) for node in wholes]  # type: ignore[arg-type]
        sites.sort(key=lambda site: min(map(order.__getitem__, site.readers)))

        def known(site: Site) -> int:
            nodes = [site.mark] if apart and site.mark is not None else _prepared_from([site.node])[1]
            return max(map(order.__getitem__, nodes))

        return make_buckets(self.joint, sites, self.settings.bucket_bytes, "all_gather", known)

    def _gather(self, buckets: list[Bucket], phase: Phase, earliest: torch.fx.Node | None = None) -> None:
        """Begin each bucket when the one before is first read, in the same place on each rank."""
        order = places(self.joint)
        moved: set[torch.fx.Node] = set()
        for place, bucket in enumerate(buckets):
            start = buckets[place - 1].reader if place else earliest
            chain, begins = _prepared_from(site.node for site in bucket.sites)
            newest = max(begins, key=order.__getitem__)
            is_ahead = start is not None and order[newest] < order[start]
            late = [node for node in chain - moved if order[node] > order[start if is_ahead else newest]]  # type: ignore[index]
            if newest.op == "placeholder" and start is None:
                newest = phase.start
            for node in sorted(late, key=order.__getitem__):
                moved.add(node)
                if is_ahead:
                    start.prepend(node)  # type: ignore[union-attr]
                else:
                    newest.append(node)
                    newest = node
            phase.put(bucket, phase.insert.before(start) if is_ahead else phase.insert.after(newest))  # type: ignore[arg-type]

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _scattered(self, target: Any, collective: str) -> list[Bucket]:
        """Buckets of the gradients that an operator exchanges."""
        nodes = self._calls(target)
        sources: list[Any] = [node.args[0] for node in nodes]
        sites = [
            Site.of_readers("", source, source.meta["val"], node) for node, source in zip(nodes, sources, strict=True)
        ]
        order = places(self.joint)
        sites.sort(key=lambda site: order[site.node])
        return make_buckets(self.joint, sites, self.settings.bucket_bytes, collective)
