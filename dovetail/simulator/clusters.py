"""Machines and their links as figures, and how long an exchange between ranks takes on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Link:
    """The link of one rank in one direction: bytes a second, and seconds that a message of no length takes."""

    bytes: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of ``ranks_per_node`` ranks, with links ``inside`` a node and ``between`` nodes.

    A rank computes at most ``flops`` operations a second in products of matrices, reads and writes ``bytes`` a second, of each of
    which operators reach the part ``efficiency``, and has ``memory`` bytes. ``overlap``: whether an exchange goes on
    beside the computation, as with the copy engines of a GPU; on CPUs without a core to spare it takes the time of both.
    ``slowdown``: by how much operators are slower than they were measured, where ranks share cores.
    ``source`` says where the figures come from.
    """

    name: str
    ranks_per_node: int
    inside: Link
    between: Link
    flops: float
    bytes: float
    memory: float
    efficiency: float = 1.0
    overlap: bool = True
    slowdown: float = 1.0
    source: str = ""

    def seconds_of_work(self, flops: float, moved: float) -> float:
        """Seconds of an operator: it computes while it reads and writes, so the longer of the two."""
        return max(flops / self.flops, moved / self.bytes) / self.efficiency

    def seconds_of_exchange(self, collective: str, size: float, ranks: Sequence[int]) -> float:
        """Seconds of a collective among these ranks; ``size`` are the bytes of the whole: what is reduced, or gathered.

        Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005): by halving and
        doubling, each of a gather and a scatter takes the logarithm of the ranks in messages, and sends all but one rank's part
        of the bytes; a reduction that all get is one of each. All ranks of a node send to others at once: their links add up.

        >>> two = Cluster("two", 1, Link(1e9, 0.0), Link(1e9, 0.0), 1.0, 1.0, 1.0)
        >>> two.seconds_of_exchange("all_reduce", 1e9, [0, 1]), two.seconds_of_exchange("all_gather", 1e9, [0, 1])
        (1.0, 0.5)
        """
        count = len(ranks)
        if count < 2:
            return 0.0
        nodes, together = self._nodes(ranks)
        width = min(
            [self.inside.bytes] * (together > 1) + [self.between.bytes * together] * (nodes > 1), default=math.inf
        )
        hops = math.ceil(math.log2(together)) * self.inside.latency + math.ceil(math.log2(nodes)) * self.between.latency
        sent = size if collective in ("broadcast", "scatter", "reduce") else size * (count - 1) / count
        times = 2 if collective == "all_reduce" else 1
        return times * (hops + sent / width)

    def _nodes(self, ranks: Sequence[int]) -> tuple[int, int]:
        """How many nodes these ranks are on, and how many of them are on one node at most.

        >>> CLUSTERS["h100"]._nodes(range(0, 16384, 2)), CLUSTERS["h100"]._nodes([0, 1, 2, 11])
        ((2048, 4), (2, 3))
        """
        node = self.ranks_per_node
        if isinstance(ranks, range) and ranks.start == 0 and (node % ranks.step == 0 or ranks.step % node == 0):
            together = min(len(ranks), max(1, node // ranks.step))
            return math.ceil(len(ranks) / together), together
        counts = Counter(rank // node for rank in ranks)
        return len(counts), max(counts.values())


_NCCL = "latencies: NCCL's tuning table, ring and tree with protocol Simple (src/graph/tuning.cc)"
_MFU = "efficiency: 44 to 52 % of the peak in training of GPT models, arXiv 2104.04473, table 1"
#: Known clusters by name; matrix products are in bfloat16 without sparsity.
CLUSTERS = {
    "a100": Cluster(
        "a100", 8, Link(300e9, 4e-6), Link(25e9, 14e-6), 312e12, 2.039e12, 80 * GIB, 0.5,
        source=f"NVIDIA's data sheet of the A100 80GB SXM; 8 with NVLink (600 GB/s both ways), HDR InfiniBand; {_NCCL}; {_MFU}",
    ),
    "h100": Cluster(
        "h100", 8, Link(450e9, 4e-6), Link(50e9, 14e-6), 989e12, 3.35e12, 80 * GIB, 0.5,
        source=f"NVIDIA's data sheet of the H100 SXM; 8 with NVLink (900 GB/s both ways), NDR InfiniBand each; {_NCCL}; {_MFU}",
    ),
}  # fmt: skip
