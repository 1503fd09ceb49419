"""Time and memory of a training step against ``memory_budget``, on the demo's GPT.

For each budget: the bytes that the plan predicts and the bytes that the run was measured to keep between forward and backward
(each storage once, without parameters and buffers), the operators computed again, and the median time of a step (forward and
backward; rounds go through all budgets in turn, so that a busy moment hits all of them). The gradients of every budget are
compared with those of the full one, bit by bit under ``aten``. Eager's own step is timed beside it.

The numbers go to ``build/memory_budget/memory_budget.json``, the plot beside it. Run it with ``make bench-memory``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dovetail
from dovetail.cli.gpt import GPT, GPTConfig

BUDGETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def timed_step(model: GPT, call: Callable[[Tensor, Tensor], Tensor], tokens: Tensor) -> float:
    """Seconds of one forward and backward."""
    model.zero_grad()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    call(tokens, tokens).backward()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def gradients(model: GPT) -> list[Tensor]:
    """The gradients of the last step."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements."""
    torch.manual_seed(0)
    device = options.device
    config = GPTConfig(vocabulary=65, block=options.block, layers=options.layers, dropout=options.dropout)
    model = GPT(config).to(device)
    tokens = torch.randint(65, (options.batch, options.block), device=device)
    joint = dovetail.capture(model, (tokens, tokens))
    compiled: list[Any] = []
    rows: list[dict[str, Any]] = []
    reference: list[Tensor] = []
    for budget in reversed(BUDGETS):
        start = time.perf_counter()
        step = joint.compile(options.backend, memory_budget=budget)
        seconds = time.perf_counter() - start
        torch.manual_seed(1)
        timed_step(model, step, tokens)
        found = gradients(model)
        reference = reference or found
        report = step.memory
        assert report is not None
        differences = [(one - other).abs().max().item() for one, other in zip(reference, found, strict=True)]
        rows.append(
            {
                "memory_budget": budget,
                "budget_bytes": report.budget,
                "predicted_bytes": report.predicted,
                "measured_bytes": report.measured,
                "operators_computed_again": report.recomputed,
                "compile_seconds": seconds,
                "largest_gradient_difference": max(differences),
            }
        )
        compiled.append(step)
    times: list[list[float]] = [[] for _ in rows]
    eager: list[float] = []
    for _ in range(options.rounds):
        eager.append(timed_step(model, model, tokens))
        for place, step in enumerate(compiled):
            times[place].append(timed_step(model, step, tokens))
    for row, found_times in zip(rows, times, strict=True):
        row["step_seconds"] = statistics.median(found_times)
        row["all_step_seconds"] = found_times
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "backend": options.backend,
        "model": {"layers": options.layers, "width": config.width, "block": options.block, "batch": options.batch},
        "eager_step_seconds": statistics.median(eager),
        "rows": rows[::-1],
    }


def plot(results: dict[str, Any], path: Path) -> None:
    """Kept bytes and time over the budget, one under the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = results["rows"]
    budgets = [row["memory_budget"] for row in rows]
    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6.5), layout="constrained")
    for name, style, label in (
        ("budget_bytes", "--", "allowed"),
        ("predicted_bytes", "-", "predicted before the run"),
        ("measured_bytes", "o", "measured in the run"),
    ):
        upper.plot(budgets, [row[name] / 2**20 for row in rows], style, label=label)
    upper.set_ylabel("kept for the backward (MiB)")
    upper.set_ylim(bottom=0)
    upper.legend()
    lower.plot(budgets, [row["step_seconds"] * 1e3 for row in rows], "o-", label=f"dovetail ({results['backend']})")
    lower.axhline(results["eager_step_seconds"] * 1e3, color="gray", linestyle=":", label="eager")
    lower.set_ylabel("forward and backward (ms, median)")
    lower.set_xlabel("memory_budget")
    lower.set_ylim(bottom=0)
    lower.legend()
    model = results["model"]
    upper.set_title(
        f"GPT, {model['layers']} layers, batch {model['batch']} x {model['block']}, {results['device']}, "
        f"torch {results['torch']}"
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, write numbers and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backend", default="aten")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--output", type=Path, default=Path("build/memory_budget"))
    options = parser.parse_args(arguments)
    results = run(options)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "memory_budget.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    plot(results, options.output / "memory_budget.png")
    print("budget   allowed  predicted  measured  again   step")
    for row in results["rows"]:
        sizes = "  ".join(f"{row[name] / 2**20:7.1f}" for name in ("budget_bytes", "predicted_bytes", "measured_bytes"))
        print(
            f"{row['memory_budget']:6.1f}  {sizes} MiB {row['operators_computed_again']:5d}  {row['step_seconds']:.4f} s"
        )
    print(f"eager: {results['eager_step_seconds']:.4f} s; written to {options.output}")


if __name__ == "__main__":
    main()
