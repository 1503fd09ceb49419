"""All ways to train a model on a number of ranks, by the clock, and which of them is best."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard

from dovetail.distributed import data_parallel, shard
from dovetail.distributed.exchange import Team
from dovetail.distributed.replicate import replicate
from dovetail.errors import DovetailError
from dovetail.face.compile import compile
from dovetail.reports.cost import amount
from dovetail.reports.table import Table
from dovetail.simulator.clusters import Cluster
from dovetail.simulator.step import Prediction, Step
from dovetail.simulator.worlds import simulated_mesh, simulated_world
from dovetail.torch_private import distributed as private_distributed


@dataclass(frozen=True)
class Training:
    """The parts of a step: ``loss(model, *batch)`` is differentiated, and ``optimizer`` steps. ``batch`` is that of one rank.

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
        return picture([self])


def summary(found: Sequence[Plans]) -> Table:
    """The best way for each number of ranks; "of linear": batches a second of a rank, against those with the first number."""
    rows = []
    for plans in found:
        best, first = plans.best, found[0]
        linear = first.best.rate * plans.ranks / first.ranks
        times = _cells(best)[1:]
        rows.append(
            (str(plans.ranks), best.way, times[0], *times[2:], f"{100 * best.rate / linear:.0f} %" if linear else "")
        )
    return Table(("ranks", "best way", "step", "waiting", "batches/s", "memory", "of linear"), tuple(rows))


def picture(found: Sequence[Plans]) -> str:
    """An SVG picture: for each number of ranks a bar for each way, as long as one batch takes, in operators and waiting."""
    parts, top = [], 0
    for plans in found:
        shown = [(row, row.prediction) for row in plans.rows if row.prediction is not None]
        longest = max((found.seconds / row.batches for row, found in shown), default=1.0)
        title = f"Time for one batch, {plans.ranks} ranks of {plans.cluster.name}"
        parts.append(f'<text x="10" y="{top + 24}" font-weight="600">{title}</text>')
        for row, prediction in shown:
            left, mark = 10.0, " (best)" if row is plans.best else ""
            label = f"{row.way}{mark}: {prediction.seconds / row.batches * 1e3:.4g} ms" + (
                "" if prediction.fits else ", does not fit into memory"
            )
            parts.append(f'<text x="10" y="{top + 54}">{html.escape(label)}</text>')
            for seconds, colour in ((prediction.compute, "#0072b2"), (prediction.exposed, "#e69f00")):
                width = 680 * seconds / row.batches / longest
                parts.append(f'<rect x="{left:.1f}" y="{top + 60}" width="{width:.1f}" height="14" fill="{colour}"/>')
                left += width
            top += 46
        top += 54
    parts.append(
        f'<text x="10" y="{top}" fill="#0072b2">operators</text><text x="100" y="{top}" fill="#b87d00">waiting</text>'
    )
    style = 'font-family="system-ui, sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {top + 12}" {style}>{"".join(parts)}</svg>\n'


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
    return next(plan_each(build, [ranks], cluster, measured=measured))


def plan_each(
    build: Callable[[], Training], numbers: Iterable[int], cluster: Cluster, *, measured: bool = False
) -> Iterator[Plans]:
    """:func:`plan` for several numbers of ranks. All ranks of a way have one graph, whose sizes do not depend on the number of
    copies, so a step is captured once for all numbers of them.
    """
    known: dict[Any, tuple[Step, dict[str, int]] | str] = {}
    has_tensor_parallel = build().tensor_parallel is not None
    for ranks in numbers:
        rows = []
        for way in _ways(ranks, cluster.ranks_per_node, has_tensor_parallel):
            if way.graph not in known:
                with simulated_world(ranks):
                    known[way.graph] = _captured(build(), way, cluster, measured)
            found = known[way.graph]
            if isinstance(found, str):
                rows.append(Row(way.name, way.batches, None, found))
            else:
                step, groups = found
                rows.append(Row(way.name, way.batches, step.run(lambda name: way.ranks(groups[name]))))  # noqa: B023
        yield Plans(ranks, cluster, tuple(rows))


@dataclass(frozen=True)
class _Way:
    """Ranks as a mesh: ``copies`` of parameters in ``shards``, each of one of ``width`` parts of a tensor-parallel plan."""

    copies: int = 1
    shards: int = 1
    width: int = 1

    @property
    def name(self) -> str:
        """In words, as long as there are two dimensions at most."""
        is_two = self.width > 1 or min(self.copies, self.shards) > 1
        parts = [f"tensor parallel {self.width}"] if self.width > 1 else []
        parts += [f"sharded{f' {self.shards}' if is_two else ''}"] if self.shards > 1 else []
        if self.copies > 1 or not parts:
            parts.append(f"data parallel{f' {self.copies}' if is_two else ''}")
        return " x ".join(parts)

    @property
    def batches(self) -> int:
        """Ranks that share products of matrices share a batch."""
        return self.copies * self.shards

    @property
    def graph(self) -> tuple[bool, int, int]:
        """The facts that the graph depends on."""
        return self.copies > 1, self.shards, self.width

    def ranks(self, dimension: int) -> range:
        """The ranks of the first rank's group along a dimension."""
        step = (self.shards * self.width, self.width, 1)[dimension]
        return range(0, (self.copies, self.shards, self.width)[dimension] * step, step)


def _ways(ranks: int, node: int, has_tensor_parallel: bool) -> Iterator[_Way]:
    yield _Way(copies=ranks)
    if ranks > 1:
        yield _Way(shards=ranks)
    if ranks > node > 1 and ranks % node == 0:
        yield _Way(copies=ranks // node, shards=node)
    # Parts of one product of matrices wait for each other in each layer, so they stay inside a node.
    widths = [width for width in range(2, min(ranks, node) + 1) if ranks % width == 0 and node % width == 0]
    for width in widths if has_tensor_parallel else ():
        yield _Way(copies=ranks // width, width=width)
        if width == widths[-1] and ranks > width:
            yield _Way(shards=ranks // width, width=width)


def spread(training: Training, change: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.nn.Module:
    """The model that ``change`` makes; the optimizer then steps the parameters that have replaced its own."""
    before = [parameter for _, parameter in training.model.named_parameters(remove_duplicate=False)]
    model = change(training.model)
    after = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    places = {id(old): new for old, new in zip(before, after, strict=True)}
    for group in training.optimizer.param_groups:
        group["params"] = [places[id(parameter)] for parameter in group["params"]]
    return model


def step_of(training: Training, model: Any) -> Callable[..., torch.Tensor]:
    """Forward, backward and update, to be compiled as one graph."""

    def step(*batch: Any) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()
        return loss.detach()

    return step


def _captured(training: Training, way: _Way, cluster: Cluster, measured: bool) -> tuple[Step, dict[str, int]] | str:
    """The step, and to which dimension each process group belongs; or why the way cannot be gone."""
    try:
        mesh = simulated_mesh(copies=way.copies, shards=way.shards, tensor=way.width)
        run = _compiled(training, way, mesh)
        for _ in range(2):
            run(*training.batch)
        step = Step.of(getattr(run, "compiled", run), cluster, measured)
    except Exception as error:  # noqa: BLE001  (a model may refuse to be cut in parts by any error, which the row shows)
        problem = error.what if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
        return problem.splitlines()[0]
    groups = {private_distributed.process_group_name(mesh.get_group(number)): number for number in range(3)}
    return step, groups | {private_distributed.process_group_name(None): int(way.shards > 1)}


def _compiled(training: Training, way: _Way, mesh: Any) -> Any:
    """The whole step as one graph, exchanges and update included."""
    whole_step = functools.partial(compile, backend="aten", fullgraph=True)
    if way.width == 1 and way.shards == 1:
        return data_parallel(step_of(training, training.model), backend="aten", modules=[training.model])
    if way.width == 1 and way.copies == 1:
        return whole_step(step_of(training, spread(training, shard)))

    def change(model: torch.nn.Module) -> torch.nn.Module:
        if way.width > 1:
            model = private_distributed.parallelize(model, mesh["tensor"], training.tensor_parallel)
        for unit in _units(model) if way.shards > 1 else ():
            fully_shard(unit, mesh=mesh["copies", "shards"] if way.copies > 1 else mesh["shards"])
        return model

    passes = []
    if way.shards == 1 and way.copies > 1:
        passes.append(replicate(Team(private_distributed.process_group_name(mesh.get_group("copies")), way.copies)))
    return whole_step(step_of(training, spread(training, change)), passes=tuple(passes))


def _units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules gathered together: each member of a list or sequence of modules, and the rest of the model."""
    found: list[torch.nn.Module] = []

    def visit(module: torch.nn.Module) -> None:
        is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
        for child in module.children():
            if is_list and any(True for _ in child.parameters()):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return [*found, model]
