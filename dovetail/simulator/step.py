"""One rank's graph by the clock: operators in order, exchanges beside them, memory by liveness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed

from dovetail.distributed.operators import collectives
from dovetail.errors import StageError
from dovetail.reports.cost import amount, bytes_moved, flops_of, memory_of_call
from dovetail.reports.explanation import compiled_function
from dovetail.reports.measured import measure
from dovetail.runtime.entry import Entry
from dovetail.simulator.clusters import Cluster
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import sizes as private_sizes


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
    function = compiled_function(compiled)
    entries = [entry for entry in function.entries if entry.compiled is not None]
    if not entries:
        raise StageError("nothing has been compiled yet", advice="call the compiled function once before it is asked")
    entry = entries[0]
    clock = Clock(cluster, _times(entry, cluster, measured))
    for node in entry.compiled.joint.graph.nodes:
        if node.op == "call_function":
            clock.run(node)
    return clock.stop(memory_of_call(entry.compiled).peak)


def _times(entry: Entry, cluster: Cluster, measured: bool) -> Callable[[torch.fx.Node], float]:
    known: Mapping[str, float] = measure(entry).seconds if measured else {}

    def seconds(node: torch.fx.Node) -> float:
        if node.name in known:
            return known[node.name] * cluster.slowdown
        return cluster.seconds_of_work(flops_of(node), bytes_moved(node))

    return seconds


class Clock:
    """Time on one rank: that of the operators, and for each process group the time until which its links are in use."""

    def __init__(self, cluster: Cluster, seconds: Callable[[torch.fx.Node], float]) -> None:
        self._cluster = cluster
        self._seconds = seconds
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
        ranks = torch.distributed.get_process_group_ranks(private_distributed.process_group(group))
        # A gather gives the whole, the others take it.
        whole = (
            [node.meta["val"]] if collective == "all_gather" else [item.meta["val"] for item in node.all_input_nodes]
        )
        size = sum(map(_bytes, whole))
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


def _bytes(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    return private_sizes.hint(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0
