"""All ways to train a model on a number of ranks, by the clock, and which of them is best."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from dovetail.distributed import data_parallel, shard
from dovetail.distributed.exchange import Team
from dovetail.distributed.replicate import replicate
from dovetail.errors import DovetailError
from dovetail.face.compile import compile
from dovetail.reports.cost import amount
from dovetail.reports.table import Table
from dovetail.simulator.clusters import Cluster
from dovetail.simulator.step import Prediction, simulate
from dovetail.simulator.worlds import simulated_world
from dovetail.torch_private import distributed as private_distributed


@dataclass(frozen=True)
class Training:
    """What a step is made of: ``loss(model, *batch)`` is differentiated, and ``optimizer`` steps. ``batch`` is that of one rank.

    ``tensor_parallel`` is a plan of ``torch.distributed.tensor.parallel.parallelize_module``; without one, no tensor-parallel way
    is tried.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[..., torch.Tensor]
    batch: tuple[Any, ...]
    tensor_parallel: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Row:
    """One way: ``batches`` of them in a step on all ranks; ``prediction`` is None where the way cannot be gone, for ``problem``."""

    way: str
    batches: int
    prediction: Prediction | None
    problem: str = ""

    @property
    def rate(self) -> float:
        """Batches a second; 0 where a rank has too little memory."""
        found = self.prediction
        return self.batches / found.seconds if found is not None and found.fits and found.seconds > 0 else 0.0


@dataclass(frozen=True, repr=False)
class Plans:
    """The ways with their predictions."""

    ranks: int
    cluster: Cluster
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row:
        """The way with the most batches a second among those that fit into memory; the first one where none does."""
        return max(self.rows, key=lambda row: row.rate)

    @property
    def reason(self) -> str:
        """Why the best is best, in a sentence."""
        best, found = self.best, self.best.prediction
        if all(row.prediction is None for row in self.rows):
            return "no way can be gone"
        if found is None or not best.rate:
            return f"no way fits into the {amount(self.cluster.memory, 1024)}B of a rank"
        others = []
        for row in self.rows:
            if row is not best and row.prediction is not None:
                lack = f"needs {amount(row.prediction.peak_memory, 1024)}B" if not row.prediction.fits else ""
                others.append(f"{row.way} {lack or f'makes {row.rate:.4g}'}")
        exposed = f"waits {100 * found.exposed / found.seconds:.1f} % of the time"
        more = f"; {', '.join(others)}" if others else ""
        return f"{best.way}: {best.rate:.4g} batches a second, {exposed}{more}"

    def table(self) -> Table:
        """A row for each way."""
        return Table(("way", "step", "operators", "waiting", "batches/s", "memory"), tuple(map(_cells, self.rows)))

    def __repr__(self) -> str:
        return f"{self.ranks} ranks of {self.cluster.name}\n{self.table()}\n{self.reason}"

    def picture(self) -> str:
        """An SVG picture: of each way the time of a step, operators and waiting."""
        shown = [(row, row.prediction) for row in self.rows if row.prediction is not None]
        longest = max((found.seconds / row.batches for row, found in shown), default=1.0)
        parts = [
            f'<text x="10" y="24" font-weight="600">Time for one batch, {self.ranks} ranks of {self.cluster.name}</text>'
        ]
        for number, (row, found) in enumerate(shown):
            top, left = 44 + 46 * number, 10.0
            label = f"{row.way}: {found.seconds / row.batches * 1e3:.4g} ms" + (
                "" if found.fits else ", does not fit into memory"
            )
            parts.append(f'<text x="10" y="{top + 10}">{html.escape(label)}</text>')
            for seconds, colour in ((found.compute, "#0072b2"), (found.exposed, "#e69f00")):
                width = 680 * seconds / row.batches / longest
                parts.append(f'<rect x="{left:.1f}" y="{top + 16}" width="{width:.1f}" height="14" fill="{colour}"/>')
                left += width
        low = 64 + 46 * len(shown)
        parts.append(
            f'<text x="10" y="{low}" fill="#0072b2">operators</text><text x="100" y="{low}" fill="#b87d00">waiting</text>'
        )
        style = 'font-family="system-ui, sans-serif" font-size="13"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {low + 12}" {style}>{"".join(parts)}</svg>\n'


def _cells(row: Row) -> tuple[str, ...]:
    found = row.prediction
    if found is None:
        return (row.way, row.problem, "", "", "", "")
    times = (f"{seconds * 1e3:.4g} ms" for seconds in (found.seconds, found.compute, found.exposed))
    lack = "" if found.fits else " (too much)"
    return (row.way, *times, f"{row.rate:.4g}", f"{amount(found.peak_memory, 1024)}B{lack}")


def plan(build: Callable[[], Training], ranks: int, cluster: Cluster, *, measured: bool = False) -> Plans:
    """Predict a step for each way to train on that many ranks.

    ``build`` makes the model, its optimizer and a batch anew for each way. Each step runs twice here, with exchanges that
    do nothing, so that the graph of a steady step is taken. ``measured``: see :func:`~dovetail.simulator.simulate`. A way that
    Dovetail or the model refuses is a row with the reason. Raises :class:`DistributedError` where there is a process group.
    """
    rows: list[Row] = []
    with simulated_world(ranks):
        for name, batches, run in _ways(build, ranks, cluster, measured):
            try:
                rows.append(Row(name, batches, run()))
            except Exception as error:  # noqa: BLE001  (a model may refuse to be cut in parts by any error, which the row shows)
                problem = error.what if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
                rows.append(Row(name, batches, None, problem.splitlines()[0]))
    return Plans(ranks, cluster, tuple(rows))


def _ways(
    build: Callable[[], Training], ranks: int, cluster: Cluster, measured: bool
) -> Iterator[tuple[str, int, Callable[[], Prediction]]]:
    yield "data parallel", ranks, lambda: _whole_step(build(), cluster, measured, is_sharded=False)
    yield "sharded", ranks, lambda: _whole_step(build(), cluster, measured, is_sharded=True)
    if build().tensor_parallel is None:
        return
    # Parts of one product of matrices wait for each other in each layer, so they stay inside a node.
    for width in range(2, min(ranks, cluster.ranks_per_node) + 1):
        if ranks % width == 0 and cluster.ranks_per_node % width == 0:
            others = ranks // width
            name = f"tensor parallel {width}" + (f" x data parallel {others}" if others > 1 else "")

            def run(width: int = width) -> Prediction:
                return _in_parts(build(), cluster, measured, width, ranks // width)

            yield name, others, run


def _whole_step(training: Training, cluster: Cluster, measured: bool, *, is_sharded: bool) -> Prediction:
    """Forward, backward and update as one graph."""
    model, optimizer = training.model, training.optimizer
    if is_sharded:
        before = list(model.parameters())
        model = shard(model)
        use(optimizer, before, list(model.parameters()))

    step = _step_of(training, model)
    run = (
        compile(step, backend="aten", fullgraph=True)
        if is_sharded
        else data_parallel(step, backend="aten", modules=[model])
    )
    for _ in range(2):
        run(*training.batch)
    return simulate(run if is_sharded else run.compiled, cluster, measured=measured)


def _step_of(training: Training, model: Any) -> Callable[..., torch.Tensor]:
    def step(*batch: Any) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()
        return loss.detach()

    return step


def use(optimizer: torch.optim.Optimizer, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
    """Let an optimizer that was made for some parameters step others."""
    places = {id(parameter): number for number, parameter in enumerate(before)}
    for group in optimizer.param_groups:
        group["params"] = [after[places[id(parameter)]] for parameter in group["params"]]


def _in_parts(training: Training, cluster: Cluster, measured: bool, width: int, others: int) -> Prediction:
    """Forward, backward and update as one graph, of DTensors."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (others, width), mesh_dim_names=("data", "tensor"))
    model = private_distributed.parallelize(training.model, mesh["tensor"], training.tensor_parallel)
    name = private_distributed.process_group_name(mesh.get_group("data"))
    passes = (replicate(Team(name, others)),) if others > 1 else ()
    run = compile(_step_of(training, model), backend="aten", fullgraph=True, passes=passes)
    for _ in range(2):
        run(*training.batch)
    return simulate(run, cluster, measured=measured)
