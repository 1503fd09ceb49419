"""Training steps with second derivatives: eager, torch.compile and Dovetail.

Each engine trains the five programs of ``examples/`` in two ways. It compiles either the ``part`` that the example is about (a
model or a loss), so that derivatives are taken through it from outside, or the ``whole`` step: the same lines with their
derivatives and their optimizer, in one call. Eager runs the same program in both. torch.compile's variants are tried from the
fastest to the one that compiles least (``inductor``, ``aot_eager``, ``eager``); the first whose losses are eager's is measured,
and a line gives the error of each of the others, or the distance of its losses. Rounds of steps alternate between the engines
in one process; the table has medians of times and of the rounds' ratios. Run it with ``make bench-second-order``.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measuring import alternating, describe, load_example, make_parser, positive, relative_difference, save

import dovetail
from dovetail.reports.table import Table

EXAMPLES = ("energy_and_forces", "pinn", "wgan_gp", "maml", "hessian_vector")
#: The compiled part of a program.
UNITS = ("part", "whole")
VARIANTS = ("inductor", "aot_eager", "eager")
#: The goal for programs with small kernels: eager's time over Dovetail's.
GOAL = 1.5
TOLERANCE = 1e-4


def best_of_torch(module: Any, expected: list[float], whole: bool) -> tuple[str | None, dict[str, str]]:
    """Return the first variant of torch.compile that works, and the trouble with those before it."""
    troubles: dict[str, str] = {}
    for variant in VARIANTS:
        torch.compiler.reset()
        try:
            losses = module.train(lambda item: torch.compile(item, backend=variant), whole=whole)  # noqa: B023
        except Exception as error:  # noqa: BLE001  (any error of the other compiler is its result)
            troubles[variant] = describe(error)
            continue
        off = relative_difference(losses, expected)
        if off < TOLERANCE:
            return variant, troubles
        troubles[variant] = f"losses are off by {off:.1e}"
    return None, troubles


def seconds(step: Callable[[int], float], first: int, steps: int) -> float:
    """Return the time of one step."""
    start = time.perf_counter()
    for number in range(first, first + steps):
        step(number)
    return (time.perf_counter() - start) / steps


def measure(name: str, whole: bool, backend: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return all numbers of one program."""
    module = load_example(name)
    engines: dict[str, Callable[[Any], Any]] = {
        "eager": lambda item: item,
        "dovetail": lambda item: dovetail.compile(item, backend=backend, fullgraph=True),
    }
    expected = module.train(engines["eager"], whole=whole)
    losses = module.train(engines["dovetail"], whole=whole)
    variant, troubles = best_of_torch(module, expected, whole)
    result: dict[str, Any] = {
        "dovetail_difference": relative_difference(losses, expected),
        "torch_variant": variant,
        "torch_troubles": troubles,
    }
    if variant is not None:
        torch.compiler.reset()
        engines["torch.compile"] = lambda item: torch.compile(item, backend=variant)
    running = {engine: module.prepare(wrap, whole) for engine, wrap in engines.items()}
    warm_up = max(8, steps)
    for engine, step in running.items():
        result[f"warm_up_{engine}"] = seconds(step, 0, warm_up) * warm_up
    times: dict[str, list[float]] = {engine: [] for engine in running}
    for number, engine in alternating(list(running), rounds):
        times[engine].append(seconds(running[engine], warm_up + number * steps, steps))
    result["seconds_per_step"] = times
    return result


def row_of(name: str, unit: str, result: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of the table for one program."""
    times = result["seconds_per_step"]
    cells = {engine: f"{statistics.median(each) * 1e3:.2f} ms" for engine, each in times.items()}
    theirs = f"{cells['torch.compile']} ({result['torch_variant']})" if "torch.compile" in cells else "-"
    # Round by round: other work on the machine slows both.
    speed_up = statistics.median(eager / ours for eager, ours in zip(times["eager"], times["dovetail"], strict=True))
    off = f"{result['dovetail_difference']:.0e}"
    return name, unit, cells["eager"], theirs, cells["dovetail"], f"{speed_up:.2f}", off


def main() -> int:
    """Measure, print the table, save the raw numbers; 0 if all losses are eager's."""
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=positive, default=12)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    results: dict[str, dict[str, Any]] = {}
    rows = []
    for name, unit in [(name, unit) for name in options.examples for unit in options.units]:
        result = measure(name, unit == "whole", options.backend, options.rounds, options.steps)
        results[f"{name}, {unit}"] = result
        rows.append(row_of(name, unit, result))
        print(f"{name}, {unit}: done", flush=True)
        for variant, trouble in result["torch_troubles"].items():
            print(f"  torch.compile, {variant}: {trouble}", flush=True)
    head = ("program", "compiled", "eager", "torch.compile", f"Dovetail ({options.backend})", "speed-up", "off by")
    print(f"\nTime of a training step, {options.threads} threads, medians of {options.rounds} rounds (goal: {GOAL})")
    print(Table(head, tuple(rows)))
    save("second-order", options, results=results)
    return 0 if all(result["dovetail_difference"] < TOLERANCE for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
