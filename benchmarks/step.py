"""The whole training step: eager, eager with a fused optimizer, torch.compile's variants and Dovetail, in one run.

Each variant of a program has a process of its own, and the processes take turns of a few steps: only one computes at any time,
so that other work on the machine slows all of them alike. The table has medians of the rounds, and two kinds of peak memory:

- *tensors*: the most bytes that torch's allocator held at once during steps, above what it held before (torch's profiler
  counts them), so without weights and the optimizer's state, which are the same everywhere;
- *process*: the most memory that the process had resident during the steps that were timed, after all compiling.

A step may take a quarter longer in one process than in the next with the same code (the places of its memory decide):
``--processes 3`` starts each variant three times, with the kernels compiled by the first.

The losses of the first steps are compared with eager's. ``--autocast`` computes the losses in bfloat16. The last column is the
share of the machine's peak of matrix products, measured in the same run, that the matrix products and convolutions of a step (as
torch's counter has them for eager) make up at that speed; the rest is bound by memory and by what is around the kernels.
Run it with ``make bench-step``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from measuring import alternating, describe, make_parser, peak_of_tensors, positive, relative_difference, save
from peaks import matrix_products
from pipe import Worker, WorkerError, start_worker
from step_programs import PROGRAMS, VARIANTS, Step, in_bfloat16
from torch.utils.flop_counter import FlopCounterMode

from dovetail.reports.table import Table

#: The steps whose losses are compared before anything is timed.
WARM_UP = 6
TOLERANCE = 1e-3
#: A number of bfloat16 has eight bits, and each engine rounds in other places.
AUTOCAST_TOLERANCE = 3e-2


def ask(worker: Worker, **question: Any) -> dict[str, Any]:
    """Ask a variant's process; ``failure`` in the answer says why there is none."""
    try:
        return worker.ask(question)
    except WorkerError as error:
        return {"failure": str(error)}


def serve(program: str, variant: str, threads: int, autocast: bool) -> None:
    """Answer the lines of the parent until there are no more, in a process for one variant."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    made = PROGRAMS[program]()
    step = VARIANTS[variant](in_bfloat16(made) if autocast else made)
    number = 0
    for line in sys.stdin:
        question = json.loads(line)
        numbers = range(number, number + question["steps"])
        try:
            answer = QUESTIONS[question["what"]](step, numbers)
        except Exception as error:  # noqa: BLE001  (the failure of a variant is a result)
            answer = {"failure": describe(error)}
        number = numbers.stop
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def warm_up(step: Step, numbers: range) -> dict[str, Any]:
    """Run the first steps; return their losses and their time together."""
    begin = time.perf_counter()
    losses = [step(number) for number in numbers]
    seconds = time.perf_counter() - begin
    reset_peak()
    return {"losses": losses, "seconds": seconds}


def timed(step: Step, numbers: range) -> dict[str, Any]:
    """Return the time of one step."""
    begin = time.perf_counter()
    for number in numbers:
        step(number)
    return {"seconds": (time.perf_counter() - begin) / len(numbers)}


def peaks(step: Step, numbers: range) -> dict[str, Any]:
    """Return both kinds of peak memory."""
    return {"process": resident_peak(), "tensors": peak_of_tensors(lambda: [step(number) for number in numbers])}


def operations(step: Step, numbers: range) -> dict[str, Any]:
    """Return the floating-point operations of a step, those of matrix products and convolutions; nothing where torch cannot
    count them: its counter follows modules by hooks, which fail where the step itself takes gradients of leaves.
    """
    try:
        with FlopCounterMode(display=False) as counter:
            step(numbers.start)
    except RuntimeError as error:
        if "_will_engine_execute_node" not in str(error):
            raise
        return {}
    return {"operations": counter.get_total_flops()}


QUESTIONS = {"warm up": warm_up, "time": timed, "memory": peaks, "operations": operations}


def reset_peak() -> None:
    """Start a new measurement of the peak of resident memory, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_peak() -> int | None:
    """Return the peak of resident memory in bytes; None where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def _measure_once(
    program: str, results: dict[str, dict[str, Any]], caches: dict[str, str], options: argparse.Namespace
) -> None:
    """Run one process for each variant. First results stay; times are added, and peaks are the highest."""
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for variant, result in results.items():
            command = [sys.executable, __file__, "--child", program, variant, "--threads", str(options.threads)]
            command += ["--autocast"] if options.autocast else []
            environment = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": caches[variant],
                "OMP_NUM_THREADS": str(options.threads),
            }
            log = options.output / f"{program}-{variant}.log"
            workers[variant] = stack.enter_context(start_worker(command, log, environment))
            result.update({**ask(workers[variant], what="warm up", steps=WARM_UP), **result})
        for _, variant in alternating(list(results), options.rounds):
            if "failure" not in results[variant]:
                answer = ask(workers[variant], what="time", steps=options.steps)
                results[variant]["times"].append(answer.get("seconds"))
                results[variant].update({key: item for key, item in answer.items() if key == "failure"})
        for variant, result in results.items():
            if "failure" not in result:
                for name, peak in ask(workers[variant], what="memory", steps=4).items():
                    known = result.get(name)
                    result[name] = peak if known is None or (peak is not None and peak > known) else known
        if "failure" not in results["eager"]:
            results["eager"].update(ask(workers["eager"], what="operations", steps=1))


def measure(program: str, variants: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return all numbers of one program: warm up each variant, then let them take turns, in as many processes as asked for."""
    results: dict[str, dict[str, Any]] = {variant: {"times": []} for variant in variants}
    with contextlib.ExitStack() as folders:
        made = tempfile.TemporaryDirectory
        caches = {variant: folders.enter_context(made(prefix="dovetail-bench-")) for variant in variants}
        for _ in range(options.processes):
            _measure_once(program, results, caches, options)
    expected = results["eager"].get("losses")
    for result in results.values():
        if "failure" not in result and expected is not None:
            result["off"] = relative_difference(result["losses"], expected)
            if not result["off"] <= (AUTOCAST_TOLERANCE if options.autocast else TOLERANCE):
                result["failure"] = f"wrong: losses are off by {result['off']:.1e}"
    return results


def rows_of(program: str, results: dict[str, dict[str, Any]], peak: float) -> list[tuple[str, ...]]:
    """Return the rows of the table for one program; ``peak`` in operations a second."""
    rows = []
    operations = results["eager"].get("operations", 0)
    for variant, result in results.items():
        if "failure" in result:
            rows.append((program, variant, "-", "-", "-", "-", "-", "-"))
            continue
        median = statistics.median(result["times"])
        rows.append(
            (
                program,
                variant,
                f"{median * 1e3:.2f} ms",
                f"{result['tensors'] / 2**20:.2f} MiB",
                "-" if result["process"] is None else f"{result['process'] / 2**20:.0f} MiB",
                f"{result['seconds']:.1f} s",
                f"{result['off']:.0e}",
                f"{operations / median / peak:.0%}" if operations else "-",
            )
        )
    return rows


def verdict(program: str, results: dict[str, dict[str, Any]]) -> str:
    """Compare Dovetail's best variant with the best one of torch.compile, in words."""
    best: dict[str, tuple[float, int, str]] = {}
    for variant, result in results.items():
        if "failure" not in result:
            engine = variant.partition(",")[0]
            mine = (statistics.median(result["times"]), result["tensors"], variant)
            best[engine] = min(best.get(engine, mine), mine)
    if "Dovetail" not in best or "torch.compile" not in best:
        return f"{program}: nothing to compare"
    (ours, our_bytes, our_name), (theirs, their_bytes, their_name) = best["Dovetail"], best["torch.compile"]
    return (
        f"{program}: {our_name} takes {ours / theirs:.2f} times as long as {their_name}, "
        f"with {our_bytes / max(their_bytes, 1):.2f} times the memory of tensors"
    )


def main() -> int:
    """Measure, print the table, save the raw numbers; 0 if no variant of Dovetail failed."""
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--processes", type=positive, default=1, help="processes for each variant, one after the other")
    parser.add_argument("--child", nargs=2, metavar=("PROGRAM", "VARIANT"), help=argparse.SUPPRESS)
    parser.add_argument("--autocast", action="store_true", help="compute the losses in bfloat16")
    options = parser.parse_args()
    if options.child:
        serve(*options.child, options.threads, options.autocast)
        return 0
    peak = matrix_products(torch.bfloat16 if options.autocast else torch.float32, options.threads)
    variants = list(dict.fromkeys(["eager", *options.variants]))
    options.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    rows = []
    verdicts = []
    for program in options.programs:
        results[program] = measure(program, variants, options)
        rows += rows_of(program, results[program], peak)
        verdicts.append(verdict(program, results[program]))
        print(f"{program}: done\n  {verdicts[-1]}", flush=True)
        for variant, result in results[program].items():
            if "failure" in result:
                print(f"  {variant}: {result['failure']}", flush=True)
    head = ("program", "variant", "step", "tensors", "process", "first steps", "off by", "of peak")
    rounds = options.rounds * options.processes
    kind = ", autocast to bfloat16" if options.autocast else ""
    print(f"\nTime of a training step, {options.threads} threads, medians of {rounds} rounds{kind}")
    print(Table(head, tuple(rows)))
    print("\n".join(verdicts))
    print(f"peak of matrix products: {peak / 1e9:.0f} billion operations a second")
    save("step", options, results=results, peak=peak)
    failed = [name for each in results.values() for name, result in each.items() if "failure" in result]
    return 1 if any(name.startswith("Dovetail") for name in failed) else 0


if __name__ == "__main__":
    sys.exit(main())
