"""Time and memory of a training step against ``memory_budget``, on the demo's GPT, beside eager and torch.compile.

For each budget: the bytes that the plan predicts and the bytes that the run was measured to keep between forward and backward
(each storage once, without parameters and buffers), the operators computed again, and the median time of a step (forward and
backward; rounds go through all budgets in turn, so that a busy moment hits all of them). The gradients of every budget are
compared with those of the full one, bit by bit under ``aten``. The steps of eager and torch.compile are timed in the same rounds.

A plot is written beside the raw numbers, where matplotlib is installed. Run it with ``make bench-memory``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import torch
from measuring import alternating, make_parser, positive, save
from torch import Tensor

import dovetail
from dovetail.cli.gpt import GPT, GPTConfig
from dovetail.reports.table import Table

BUDGETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BYTES = ("budget_bytes", "predicted_bytes", "measured_bytes")


def timed_step(model: GPT, call: Callable[[Tensor, Tensor], Tensor], tokens: Tensor) -> float:
    """Return the seconds of one forward and backward."""
    model.zero_grad()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    call(tokens, tokens).backward()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def gradients(model: GPT) -> list[Tensor]:
    """Return the gradients of the last step."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of all budgets and the step times of eager and torch.compile."""
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=65, block=options.block, layers=options.layers, dropout=options.dropout)
    model = GPT(config).to(options.device)
    tokens = torch.randint(65, (options.batch, options.block), device=options.device)
    joint = dovetail.capture(model, (tokens, tokens))
    calls: dict[str, Callable[..., Any]] = {"eager": model, "torch.compile": torch.compile(model)}
    rows: dict[str, dict[str, Any]] = {}
    reference: list[Tensor] = []
    for budget in reversed(BUDGETS):
        start = time.perf_counter()
        step = calls[str(budget)] = joint.compile(options.backend, memory_budget=budget)
        seconds = time.perf_counter() - start
        torch.manual_seed(1)
        timed_step(model, step, tokens)
        found = gradients(model)
        reference = reference or found
        report = step.memory
        assert report is not None
        rows[str(budget)] = {
            "memory_budget": budget,
            "budget_bytes": report.budget,
            "predicted_bytes": report.predicted,
            "measured_bytes": report.measured,
            "operators_computed_again": report.recomputed,
            "compile_seconds": seconds,
            "largest_gradient_difference": max(
                (one - other).abs().max().item() for one, other in zip(reference, found, strict=True)
            ),
        }
    timed_step(model, calls["torch.compile"], tokens)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _, name in alternating(list(calls), options.rounds):
        times[name].append(timed_step(model, calls[name], tokens))
    for name, row in rows.items():
        row["step_seconds"], row["all_step_seconds"] = statistics.median(times[name]), times[name]
    others = {name: {"step_seconds": statistics.median(times[name]), "all": times[name]} for name in list(calls)[:2]}
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    return {"device": device, "width": config.width, "others": others, "rows": list(rows.values())[::-1]}


def plot(results: dict[str, Any], options: argparse.Namespace, path: Path) -> None:
    """Plot kept bytes and time over the budget, one under the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = results["rows"]
    budgets = [row["memory_budget"] for row in rows]
    figure = Figure(figsize=(7, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    labels = ("allowed", "predicted before the run", "measured in the run")
    for name, style, label in zip(BYTES, ("--", "-", "o"), labels, strict=True):
        upper.plot(budgets, [row[name] / 2**20 for row in rows], style, label=label)
    upper.set(ylabel="kept for the backward (MiB)")
    lower.plot(budgets, [row["step_seconds"] * 1e3 for row in rows], "o-", label=f"dovetail ({options.backend})")
    for (name, other), style in zip(results["others"].items(), (":", "-."), strict=True):
        lower.axhline(other["step_seconds"] * 1e3, color="gray", linestyle=style, label=name)
    lower.set(ylabel="forward and backward (ms, median)", xlabel="memory_budget")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.legend()
    sizes = f"{options.layers} layers, batch {options.batch} x {options.block}"
    upper.set_title(f"GPT, {sizes}, {results['device']}, torch {torch.__version__}")
    figure.savefig(path, dpi=150)


def main() -> int:
    """Measure, print the table, save the raw numbers and the plot."""
    parser = make_parser(__doc__, rounds=7)
    for flag, value in (("--layers", 6), ("--block", 128), ("--batch", 8)):
        parser.add_argument(flag, type=positive, default=value)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--backend", default="aten")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = measure(options)
    rows = [
        (
            f"Dovetail, {row['memory_budget']:.1f}",
            *(f"{row[name] / 2**20:.1f} MiB" for name in BYTES),
            str(row["operators_computed_again"]),
            f"{row['step_seconds']:.4f} s",
        )
        for row in results["rows"]
    ]
    rows += [(name, "-", "-", "-", "-", f"{other['step_seconds']:.4f} s") for name, other in results["others"].items()]
    print(Table(("engine, budget", "allowed", "predicted", "measured", "again", "step"), tuple(rows)))
    target = save("memory-budget", options, **results)
    if util.find_spec("matplotlib") is not None:
        plot(results, options, target.with_suffix(".png"))
        print(f"wrote {target.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
