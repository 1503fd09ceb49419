"""One rank's graph by the clock: operators in order, exchanges beside them, memory by liveness."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed

from dovetail.distributed.operators import collectives
from dovetail.errors import StageError
from dovetail.reports.cost import amount, bytes_moved, bytes_of, flops_of, memory_of_call
from dovetail.reports.explanation import compiled_function
from dovetail.reports.measured import measure
from dovetail.runtime.entry import Entry
from dovetail.simulator.clusters import Cluster
from dovetail.torch_private import distributed as private_distributed


@dataclass(frozen=True)
class Exchange:
    """One collective: ``bytes`` of the whole among ``ranks`` ranks, seconds from the start, and how long it was waited for."""

    collective: str
    bytes: int
    ranks: int
    begin: float
    end: float
    waited: float = 0.0


@dataclass(frozen=True, repr=False)
class Prediction:
    """A step on a cluster: ``seconds`` of which operators take ``compute`` and waiting for exchanges ``exposed``; ``peak_memory``
    bytes of tensors on a rank, which ``fits`` or does not.
    """

    cluster: Cluster
    seconds: float
    compute: float
    exposed: float
    peak_memory: int
    exchanges: tuple[Exchange, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether a rank has that much memory."""
        return self.peak_memory <= self.cluster.memory

    @property
    def exchanging(self) -> float:
        """Seconds in which the links are in use."""
        return sum(item.end - item.begin for item in self.exchanges)

    def __repr__(self) -> str:
        return (
            f"{self.seconds * 1e3:.3f} ms a step on {self.cluster.name}: {self.compute * 1e3:.3f} ms of operators, "
            f"{self.exposed * 1e3:.3f} ms of waiting for {len(self.exchanges)} exchanges that take {self.exchanging * 1e3:.3f} ms; "
            f"{amount(self.peak_memory, 1024)}B at the peak"
        )


def simulate(compiled: Any, cluster: Cluster, *, measured: bool = False) -> Prediction:
    """Run the graph that a compiled function or module used last on a cluster, by the clock.

    Operators take what the cluster's processors need for arithmetic or memory traffic; with ``measured``, what they take on this
    machine, one by one, times the cluster's ``slowdown``. Kernels that a backend fuses take less than their operators one
    by one. Sizes are those of the graph: a captured step of rank 0 in a :func:`~dovetail.simulator.simulated_world`, or a real one.

    Raises :class:`StageError` where nothing has been compiled yet.
    """
    return Step.of(compiled, cluster, measured).run(ranks_of_group)


def ranks_of_group(name: str) -> Sequence[int]:
    """The ranks of a process group that is there now."""
    return torch.distributed.get_process_group_ranks(private_distributed.process_group(name))


@dataclass(frozen=True)
class Step:
    """One rank's operators and exchanges in order, what each operator takes, and the peak of memory."""

    cluster: Cluster
    nodes: tuple[torch.fx.Node, ...]
    seconds: Callable[[torch.fx.Node], float]
    peak_memory: int

    @classmethod
    def of(cls, compiled: Any, cluster: Cluster, measured: bool) -> Step:
        """That of the graph which was used last; raises :class:`StageError` where there is none."""
        entries = [entry for entry in compiled_function(compiled).entries if entry.compiled is not None]
        if not entries:
            raise StageError(
                "nothing has been compiled yet", advice="call the compiled function once before it is asked"
            )
        made = entries[0].compiled
        nodes = tuple(node for node in made.joint.graph.nodes if node.op == "call_function")
        return cls(cluster, nodes, _times(entries[0], cluster, measured), memory_of_call(made).peak)

    def run(self, ranks_of: Callable[[str], Sequence[int]]) -> Prediction:
        """The prediction, where the process group of a name has these ranks."""
        clock = Clock(self.cluster, self.seconds, ranks_of)
        for node in self.nodes:
            clock.run(node)
        return clock.stop(self.peak_memory)


def _times(entry: Entry, cluster: Cluster, measured: bool) -> Callable[[torch.fx.Node], float]:
    known: Mapping[str, float] = measure(entry).seconds if measured else {}

    def seconds(node: torch.fx.Node) -> float:
        if node.name in known:
            return known[node.name] * cluster.slowdown
        return cluster.seconds_of_work(flops_of(node), bytes_moved(node))

    return seconds


class Clock:
    """Time on one rank: that of the operators, and for each process group the time until which its links are in use."""

    def __init__(
        self,
        cluster: Cluster,
        seconds: Callable[[torch.fx.Node], float],
        ranks_of: Callable[[str], Sequence[int]] = ranks_of_group,
    ) -> None:
        self._cluster = cluster
        self._seconds = seconds
        self._ranks_of = functools.cache(ranks_of)
        self._now = self._computed = self._waited = 0.0
        self._busy: dict[str, float] = {}
        self._exchanges: dict[torch.fx.Node, Exchange] = {}

    def run(self, node: torch.fx.Node) -> None:
        """Let the time pass that an operator takes."""
        namespace = getattr(node.target, "namespace", "")
        if node.target is collectives.wait_tensor.default:
            self._wait(node.all_input_nodes[0])
        elif namespace in ("_c10d_functional", "_c10d_functional_autograd"):
            self._begin(node)
        elif namespace != "dovetail_distributed":
            took = self._seconds(node)
            self._now += took
            self._computed += took

    def _begin(self, node: torch.fx.Node) -> None:
        name = str(node.target._opname).removesuffix("_coalesced").removesuffix("_")  # type: ignore[union-attr]
        collective = next(
            (
                kind
                for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
                if kind in name
            ),
            name,
        )
        group = next(item for item in reversed(node.args) if isinstance(item, str))
        ranks = self._ranks_of(group)
        # A gather gives the whole, the others take it.
        whole = (
            [node.meta["val"]] if collective == "all_gather" else [item.meta["val"] for item in node.all_input_nodes]
        )
        size = sum(map(bytes_of, whole))
        took = self._cluster.seconds_of_exchange(collective, size, ranks)
        begin = max(self._now, self._busy.get(group, 0.0))
        end = self._busy[group] = begin + took
        exchange = Exchange(collective, size, len(ranks), begin, end)
        self._exchanges[node] = exchange
        if not self._cluster.overlap:
            self._wait(node)

    def _wait(self, node: torch.fx.Node) -> None:
        exchange = self._exchanges.get(node)
        if exchange is None:
            return
        waited = max(0.0, exchange.end - self._now)
        self._waited += waited
        self._now += waited
        values = {**vars(exchange), "waited": exchange.waited + waited}
        self._exchanges[node] = Exchange(**values)

    def stop(self, peak_memory: int) -> Prediction:
        """The prediction, when all that was begun has ended."""
        for node in list(self._exchanges):
            self._wait(node)
        exchanges = tuple(self._exchanges.values())
        return Prediction(self._cluster, self._now, self._computed, self._waited, peak_memory, exchanges)
