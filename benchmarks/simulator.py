"""Predicted against measured: steps of a GPT on 1, 2 and 4 processes of this machine, data parallel, sharded and tensor parallel.

Operators are measured one by one in this process, links by exchanges among the same processes; then the step is predicted, and
timed for real. The processes share the cores of one machine: with more of them than cores, operators take as many times longer.
Run it with ``make bench-simulator`` on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from measuring import make_parser, peak_of_tensors, positive, save

from dovetail.distributed import data_parallel, shard
from dovetail.face.compile import compile
from dovetail.reports.table import Table
from dovetail.simulator import Cluster, Link, Training, plan
from dovetail.simulator.plans import spread, step_of
from dovetail.torch_private import distributed as private_distributed

SCRIPT = Path(__file__).parent.parent / "examples" / "plan_gpt.py"
SIZES = (1 << 10, 1 << 20, 1 << 23)
WARM_UP = 3
#: Work in front of an exchange that is measured.
MATRIX_PRODUCTS = 2


def links(ranks: int, rounds: int) -> Link:
    """Bandwidth and latency of an exchange among the ranks, by the least squares of ``all_reduce`` at some sizes.

    Each exchange comes behind some work, as in a step, so that its time has the wait for the slowest rank in it.
    """
    rows, times = [], []
    hops = 2 * (ranks - 1).bit_length()
    matrix = torch.ones(512, 512)

    def work() -> float:
        torch.distributed.barrier()
        begin = time.perf_counter()
        for _ in range(MATRIX_PRODUCTS):
            matrix @ matrix
        return begin

    alone = []
    for _ in range(rounds):
        begin = work()
        alone.append(time.perf_counter() - begin)
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        found = []
        for _ in range(rounds):
            begin = work()
            torch.distributed.all_reduce(tensor)
            found.append(time.perf_counter() - begin - statistics.median(alone))
        rows.append([hops, 2 * size * (ranks - 1) / ranks])
        times.append([max(statistics.median(found), 1e-6)])
    # Relative errors count: each row is divided by its time.
    scale = 1.0 / torch.tensor(times, dtype=torch.float64)
    table = torch.tensor(rows, dtype=torch.float64) * scale
    latency, pace = torch.linalg.lstsq(table, torch.ones_like(scale)).solution.flatten().tolist()
    return Link(1.0 / max(pace, 1e-15), max(latency, 0.0))


def training() -> Training:
    """The example's model and batch, equal on all ranks."""
    torch.manual_seed(0)
    made: Training = runpy.run_path(str(SCRIPT))["build"]()
    return made


def make_step(way: str, ranks: int) -> Callable[[], None]:
    """A step as the simulator has it."""
    made = training()
    model = made.model
    if way == "sharded":
        model = spread(made, shard)
    if way.startswith("tensor parallel"):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
        model = spread(made, lambda model: private_distributed.parallelize(model, mesh, made.tensor_parallel))
    step: Any = step_of(made, model)
    if way == "data parallel":
        step = data_parallel(step, backend="aten", modules=[model])
    else:
        step = compile(step, backend="aten", fullgraph=True)
    return lambda: step(*made.batch)


def ways(ranks: int) -> tuple[str, ...]:
    """The ways that are timed on that many processes."""
    return ("data parallel", *(("sharded", f"tensor parallel {ranks}") if ranks > 1 else ()))


def alive() -> int:
    """The bytes of the tensors that are there now."""
    kinds, found = (torch.Tensor, torch.nn.Parameter), {}
    for item in gc.get_objects():
        if type(item) in kinds:
            # Those of captured graphs have no memory.
            with contextlib.suppress(RuntimeError):
                found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(found.values())


def rank_main(rank: int, ranks: int, rounds: int, port: int, target: str) -> None:
    """One process: links, then the steps; the first rank writes what it has found."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    for way in ways(ranks):
        gc.collect()
        others = alive()
        step, times = make_step(way, ranks), []
        for number in range(rounds + WARM_UP):
            torch.distributed.barrier()
            begin = time.perf_counter()
            step()
            if number >= WARM_UP:
                times.append(time.perf_counter() - begin)
        found[way] = times
        before = alive() - others
        peaks[way] = before + peak_of_tensors(step)
        del step
    link = links(ranks, rounds) if ranks > 1 else Link(1e12, 0.0)
    if rank == 0:
        torch.save({"seconds": found, "peaks": peaks, "bytes": link.bytes, "latency": link.latency}, target)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measured(ranks: int, rounds: int) -> dict[str, Any]:
    """The times of the steps on that many processes, and their links."""
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "found")
        port = 20000 + os.getpid() % 20000 + ranks
        torch.multiprocessing.spawn(rank_main, (ranks, rounds, port, target), nprocs=ranks)
        result: dict[str, Any] = torch.load(target, weights_only=True)
        return result


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of predicted and measured times."""
    torch.set_num_threads(1)
    cores = os.cpu_count() or 1
    rows = []
    for ranks in options.ranks:
        real = measured(ranks, options.rounds)
        link = Link(real["bytes"], real["latency"])
        cluster = Cluster(
            "this machine",
            ranks,
            link,
            link,
            flops=1e11,
            bytes=1e10,
            memory=1e12,
            overlap=ranks < cores,
            slowdown=max(1.0, ranks / cores),
        )
        for row in plan(training, ranks, cluster, measured=True).rows:
            if row.way not in real["seconds"]:
                continue
            if row.prediction is None:
                raise SystemExit(f"{row.way} on {ranks}: {row.problem}")
            times = real["seconds"][row.way]
            about = {
                "way": row.way,
                "ranks": ranks,
                "link": vars(link),
                "times": times,
                "measured": statistics.median(times),
                "peak": real["peaks"][row.way],
                "predicted_peak": row.prediction.peak_memory,
            }
            rows.append({**about, "predicted": row.prediction.seconds, "waiting": row.prediction.exposed})
    return rows


def main() -> None:
    """Measure, predict, print and save."""
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    rows = compare(options)
    head = (
        "way",
        "processes",
        "predicted",
        "of it waiting",
        "measured",
        "difference",
        "memory",
        "measured",
        "difference",
    )
    cells = []
    for row in rows:
        times = [f"{row[name] * 1e3:.1f} ms" for name in ("predicted", "waiting", "measured")]
        memory = [f"{row[name] / 2**20:.0f} MiB" for name in ("predicted_peak", "peak")]
        off = [
            f"{100 * (row[left] / row[right] - 1):+.0f} %"
            for left, right in (("predicted", "measured"), ("predicted_peak", "peak"))
        ]
        cells.append((row["way"], str(row["ranks"]), *times, off[0], *memory, off[1]))
    print(Table(head, tuple(cells)))
    save("simulator", options, rows=rows)


if __name__ == "__main__":
    main()
