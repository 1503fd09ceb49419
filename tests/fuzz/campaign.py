"""``python -m tests.fuzz --count 20000 --seed 0 --jobs 2``: run many random programs, print statistics, keep what fails."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.fuzz.minimise import minimise
from tests.fuzz.program import THEMES, program
from tests.fuzz.runner import BREAKS, EXCEPTION, FALL_BACK, ONE_GRAPH, Outcome, run_program

FAILURES = Path(__file__).resolve().parents[2] / "build" / "fuzz"


def _run_seed(theme: str | None, seed: int) -> tuple[int, Outcome]:
    return seed, run_program(program(seed, theme))


def _prepare() -> None:
    torch.set_num_threads(1)


def reproduce(seed: int, theme: str | None, outcome: Outcome, most_runs: int) -> Path:
    """Save a failing program, minimised, with its failure as a comment. The file runs itself through the runner."""

    def fails(text: str) -> bool:
        return run_program(text, seconds=10).kind == outcome.kind

    source = program(seed, theme)
    small = minimise(source, fails, most_runs) if most_runs else source
    final = run_program(small)
    FAILURES.mkdir(parents=True, exist_ok=True)
    path = FAILURES / f"seed_{seed}.py"
    reason = "\n".join("# " + line for line in (final.failure or outcome.failure).splitlines()[:40])
    path.write_text(f"{reason}\n{small}", encoding="utf-8")
    return path


def _results(seeds: Iterable[int], theme: str | None, jobs: int) -> Iterable[tuple[int, Outcome]]:
    run = functools.partial(_run_seed, theme)
    if jobs <= 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare, maxtasksperchild=500) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=5)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; returns the number of failures, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--theme", choices=sorted(set(THEMES)), help="what the programs are about; by default any")
    parser.add_argument("--minimise", type=int, default=300, help="most runs spent on making one failing program small")
    parser.add_argument("--run", type=Path, help="run the program of a file instead")
    parser.add_argument("--reasons", type=int, default=8, help="how many reasons of breaks and fall-backs to list")
    chosen = parser.parse_args(arguments)
    _prepare()
    if chosen.run is not None:
        outcome = run_program(chosen.run.read_text(encoding="utf-8"))
        print(outcome.category, *outcome.reasons, outcome.failure or "passes", sep="\n")
        return int(bool(outcome.kind))
    start = time.perf_counter()
    categories: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    raised = 0
    failed: list[tuple[int, Outcome]] = []
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    for seed, outcome in _results(seeds, chosen.theme, chosen.jobs):
        categories[outcome.category] += 1
        reasons.update({f"{outcome.category}: {reason}" for reason in outcome.reasons})
        raised += outcome.raised
        if outcome.kind:
            failed.append((seed, outcome))
            print(f"seed {seed} ({outcome.category}): {outcome.failure[:300]}", flush=True)
    total = sum(categories.values())
    seconds = time.perf_counter() - start
    print(f"{total} programs in {seconds:.0f} s ({seconds / max(total, 1):.2f} s each), {raised} calls raised in eager")
    for category in (ONE_GRAPH, BREAKS, FALL_BACK, EXCEPTION):
        print(f"  {category:18} {categories[category]:6}  {categories[category] / max(total, 1):6.1%}")
    for reason, count in reasons.most_common(chosen.reasons):
        print(f"    {count:5}  {reason}")
    print(f"{len(failed)} failures")
    for seed, outcome in failed[:40]:
        print("  ", reproduce(seed, chosen.theme, outcome, chosen.minimise))
    return int(bool(failed))
