"""The whole training step: eager, eager with a fused optimizer, torch.compile's variants and Dovetail, in one run.

Each variant of a program has a process of its own, and the processes take turns of a few steps: only one computes at any time,
and what else the machine does hits all of them alike. Shown are medians of the rounds, and two kinds of peak memory:

- *tensors*: the most bytes that torch's allocator held at once during steps, above what it held before (torch's profiler
  counts them), so without weights and the optimizer's state, which are the same everywhere;
- *process*: the most memory that the process had resident during the steps that were timed, after all compiling.

A step may take a quarter longer in one process than in the next with the same code (where its memory lies decides):
``--processes 3`` starts each variant three times, with the kernels compiled by the first.

The losses of the first steps are compared with eager's. Run it with ``make bench-step``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from step_programs import PROGRAMS, VARIANTS, Step

from dovetail.report.curves import Table

#: How many steps are run, and their losses compared, before anything is timed.
WARM_UP = 6
TOLERANCE = 1e-3


class Child:
    """The parent's end of the pipe to one variant's process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send one line of JSON and wait for the answer; ``failure`` in it says why there is none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return {"failure": f"the process ended with {self._process.wait()}: {''.join(said[-1:])[:200]}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def start(program: str, variant: str, threads: int, log: Path, cache: str) -> Iterator[Child]:
    """A process for one variant of one program, with its folder for compiled kernels; it is gone when the block ends."""
    with log.open("w", encoding="utf-8") as errors:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--child", program, variant, "--threads", str(threads)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        try:
            yield Child(process, log)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve(program: str, variant: str, threads: int) -> None:
    """A child's work: answer the lines of the parent until there are no more."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = VARIANTS[variant](PROGRAMS[program]())
    number = 0
    for line in sys.stdin:
        question = json.loads(line)
        steps, answer = question["steps"], {}
        try:
            if question["what"] == "warm up":
                begin = time.perf_counter()
                answer["losses"] = [step(number + index) for index in range(steps)]
                answer["seconds"] = time.perf_counter() - begin
                reset_peak()
            elif question["what"] == "time":
                begin = time.perf_counter()
                for index in range(steps):
                    step(number + index)
                answer["seconds"] = (time.perf_counter() - begin) / steps
            else:
                answer["process"] = resident_peak()
                answer["tensors"] = peak_of_tensors(step, range(number, number + steps))
        except Exception as error:  # noqa: BLE001  (what a variant cannot do is a result)
            lines = [text for text in str(error).strip().splitlines() if text]
            answer = {"failure": f"{type(error).__name__}: {lines[0][:200] if lines else ''}"}
        number += steps
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def reset_peak() -> None:
    """Begin to measure the peak of resident memory anew, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_peak() -> int | None:
    """Bytes; None where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def peak_of_tensors(step: Step, numbers: range) -> int:
    """The most bytes that torch's allocator held at once during some steps, of those that were allocated meanwhile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for number in numbers:
            step(number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        rows = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    totals = [row["args"].get("Total Allocated", 0) for row in rows if row.get("name") == "[memory]"]
    return max(totals, default=0)


def _measure_once(
    program: str,
    results: dict[str, dict[str, Any]],
    caches: dict[str, str],
    options: argparse.Namespace,
    logs: Path,
) -> None:
    """One process for each variant. What is known of the first ones stays; times are added, and peaks are the highest."""
    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        for variant, result in results.items():
            log = logs / f"{program}-{variant}.log"
            child = start(program, variant, options.threads, log, caches[variant])
            children[variant] = stack.enter_context(child)
            result.update({**children[variant].ask(what="warm up", steps=WARM_UP), **result})
        for number in range(options.rounds):
            for variant in results if number % 2 else reversed(results):
                if "failure" not in results[variant]:
                    answer = children[variant].ask(what="time", steps=options.steps)
                    results[variant]["times"].append(answer.get("seconds"))
                    results[variant].update({key: item for key, item in answer.items() if key == "failure"})
        for variant, result in results.items():
            if "failure" not in result:
                for name, peak in children[variant].ask(what="memory", steps=4).items():
                    known = result.get(name)
                    result[name] = peak if known is None or (peak is not None and peak > known) else known


def measure(program: str, variants: list[str], options: argparse.Namespace, logs: Path) -> dict[str, dict[str, Any]]:
    """All numbers of one program: warm up each variant, then let them take turns; again with other processes, if asked for."""
    results: dict[str, dict[str, Any]] = {variant: {"times": []} for variant in variants}
    with contextlib.ExitStack() as folders:
        made = tempfile.TemporaryDirectory
        caches = {variant: folders.enter_context(made(prefix="dovetail-bench-")) for variant in variants}
        for _ in range(options.processes):
            _measure_once(program, results, caches, options, logs)
    expected = results["eager"].get("losses")
    for result in results.values():
        if "failure" not in result and expected is not None:
            off = max(
                abs(one - other) / max(abs(other), 1e-12) for one, other in zip(result["losses"], expected, strict=True)
            )
            result["off"] = off
            if not off <= TOLERANCE:
                result["failure"] = f"wrong: losses are off by {off:.1e}"
    return results


def rows_of(program: str, results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """The lines of the table for one program."""
    rows = []
    for variant, result in results.items():
        if "failure" in result:
            rows.append((program, variant, "-", "-", "-", "-", "-"))
            continue
        rows.append(
            (
                program,
                variant,
                f"{statistics.median(result['times']) * 1e3:.2f} ms",
                f"{result['tensors'] / 2**20:.2f} MiB",
                "-" if result["process"] is None else f"{result['process'] / 2**20:.0f} MiB",
                f"{result['seconds']:.1f} s",
                f"{result['off']:.0e}",
            )
        )
    return rows


def verdict(program: str, results: dict[str, dict[str, Any]]) -> str:
    """How Dovetail's best variant compares with the best one of torch.compile."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1, help="processes for each variant, one after the other")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", nargs=2, metavar=("PROGRAM", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(*options.child, options.threads)
        return 0
    if min(options.rounds, options.steps, options.processes) < 1:
        parser.error("--rounds, --steps and --processes must be at least 1")
    variants = list(dict.fromkeys(["eager", *options.variants]))
    options.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    rows = []
    verdicts = []
    for program in options.programs:
        results[program] = measure(program, variants, options, options.output)
        rows += rows_of(program, results[program])
        verdicts.append(verdict(program, results[program]))
        print(f"{program}: done\n  {verdicts[-1]}", flush=True)
        for variant, result in results[program].items():
            if "failure" in result:
                print(f"  {variant}: {result['failure']}", flush=True)
    head = ("program", "variant", "step", "tensors", "process", "first steps", "off by")
    print(
        f"\nTime of a training step, {options.threads} threads, medians of {options.rounds * options.processes} rounds"
    )
    print(Table(head, tuple(rows)))
    print("\n".join(verdicts))
    now = datetime.now(UTC)
    target = options.output / f"step-{now:%Y%m%d-%H%M%S}.json"
    about = {
        "when": now.isoformat(timespec="seconds"),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "torch": torch.__version__,
        "settings": {name: item for name, item in vars(options).items() if name not in ("output", "child")},
        "results": results,
    }
    target.write_text(json.dumps(about, indent=1), encoding="utf-8")
    print(f"wrote {target}")
    failed = [
        variant
        for each in results.values()
        for variant in each
        if variant.startswith("Dovetail") and "failure" in each[variant]
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
