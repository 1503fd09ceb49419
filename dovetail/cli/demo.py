"""``dovetail demo``: trains one GPT with eager, torch.compile and Dovetail side by side, from equal seeds and batches.

Each engine has a process of its own, so that its peak memory and its time to the first step are its own. First every
engine makes its first step alone; then the engines take turns of a few steps, so that other work on the machine slows all of
them alike. Only one process computes at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from dovetail.cli.settings import ENGINES, Settings
from dovetail.reports.curves import Curve, chart, relative_deviations, write_html
from dovetail.reports.table import Table

#: The sizes of ``--small``: a run of a few minutes on two cores.
SMALL = {"layers": 3, "width": 192, "block": 64, "steps": 100}
FULL = {"layers": 6, "width": 384, "block": 128, "steps": 200}
#: The steps in which the promise about Inductor's deviation is checked; rounding grows without bound later on.
CHECKED_STEPS = 50
INDUCTOR_TOLERANCE = 1e-4


@dataclass
class Run:
    """The measurements of one engine, or its failure."""

    engine: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--small", action="store_true", help="small sizes and fewer steps, for a run of a few minutes")
    for name, value in FULL.items():
        # The default depends on --small, so argparse must leave a flag that was not given empty.
        note = f"(default: {value}, with --small {SMALL[name]})"
        text = "training steps" if name == "steps" else f"the model's {name}"
        parser.add_argument(f"--{name}", type=_positive, default=argparse.SUPPRESS, help=f"{text} {note}")
    parser.add_argument("--heads", type=_positive, default=6, help="attention heads")
    parser.add_argument("--batch", type=_positive, default=8, help="sequences per step")
    parser.add_argument("--characters", type=_positive, default=1_000_000, help="length of the text")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and batches")
    parser.add_argument("--threads", type=_positive, default=os.cpu_count() or 1, help="torch's threads")
    parser.add_argument("--turn", type=_positive, default=10, help="steps that an engine makes in its turn")
    engines = ",".join(ENGINES)
    parser.add_argument("--engines", type=_engines, default=engines, help="comma-separated engines to run")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the results")


def run(options: argparse.Namespace) -> int:
    """Train all engines, print the table and write the results; 0 if all engines agree."""
    flags = {**(SMALL if options.small else FULL), **vars(options)}
    for wrong, text in (
        (flags["width"] % options.heads, f"--width {flags['width']} is not a multiple of --heads {options.heads}"),
        (options.characters <= flags["block"], f"--characters must be more than --block {flags['block']}"),
    ):
        if wrong:
            print(f"dovetail demo: {text}", file=sys.stderr)
            return 2
    names = [name for name in Settings.__dataclass_fields__ if name != "engine"]
    settings = [Settings(engine=engine, **{name: flags[name] for name in names}) for engine in options.engines]
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    print(_heading(settings[0]), flush=True)
    try:
        runs = train_all(settings, turn=options.turn, logs=output)
    except KeyboardInterrupt:
        print("\ndovetail demo: interrupted; nothing was written", file=sys.stderr)
        return 130
    table, (remarks, agreed) = make_table(runs), compare(runs)
    print(f"\n{table}\n", *remarks, "", sep="\n")
    for path in write_results(output, settings, runs, table, remarks):
        print(f"wrote {path}")
    return 0 if agreed else 1


def train_all(settings: Sequence[Settings], *, turn: int, logs: Path) -> list[Run]:
    """Train every engine: the first step of each alone, then turns of ``turn`` steps.

    The output of the engines' processes goes to one file each in ``logs``.
    """
    runs = [Run(each.engine) for each in settings]
    total = settings[0].steps
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(total * len(runs)))
        workers: dict[str, Ask] = {}
        for run, each in zip(runs, settings, strict=True):
            progress.show(runs, "first step" if run.engine == "eager" else f"{run.engine}: first step (compiling)")
            with _recorded_failure(run):
                workers[run.engine] = stack.enter_context(_start(each, logs))
                _train(run, workers[run.engine], 1)
        while remaining := [run for run in runs if not run.failure and len(run.losses) < total]:
            for run in remaining:
                with _recorded_failure(run):
                    _train(run, workers[run.engine], min(turn, total - len(run.losses)))
                progress.show(runs, "")
        for run in runs:
            if not run.failure:
                with _recorded_failure(run):
                    run.summary = workers[run.engine](0)
    return runs


#: Has an engine's process train so many steps, and returns their losses and seconds; of no step, the summary of all.
Ask = Callable[[int], dict[str, Any]]


class WorkerError(RuntimeError):
    """The error of a process that ended before its work was done; the message holds its status and its last line."""


@contextlib.contextmanager
def _start(settings: Settings, logs: Path) -> Iterator[Ask]:
    """Start an engine's process and wait until its model is built; it is gone when the block ends."""
    context, log = multiprocessing.get_context("spawn"), logs / f"{settings.engine}.log"
    with tempfile.TemporaryDirectory(prefix="dovetail-demo-") as cache:
        connection, theirs = context.Pipe()
        process = context.Process(target=_work, args=(settings, theirs, log, cache))
        process.start()
        theirs.close()

        def ask(question: Any) -> Any:
            try:
                connection.send(question)
                return connection.recv()
            except (EOFError, OSError) as error:
                process.join()
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
                last = "".join(said[-1:])[:300]
                raise WorkerError(f"the process ended with status {process.exitcode}; see {log}: {last}") from error

        try:
            ask(settings)
            yield ask
        finally:
            connection.close()
            process.join(timeout=10)
            process.kill()
            process.join()


def _work(settings: Settings, connection: Any, log: Path, cache: str) -> None:
    """The work of an engine's process. Kernels that an earlier run has kept would make the time to the first step meaningless."""
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "DOVETAIL_CACHE_DIR": f"{cache}/dovetail"}
    with log.open("wb", buffering=0) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    from dovetail.cli.worker import serve

    serve(connection)


@contextlib.contextmanager
def _recorded_failure(run: Run) -> Iterator[None]:
    try:
        yield
    except WorkerError as error:
        run.failure = str(error)


def _train(run: Run, ask: Ask, steps: int) -> None:
    answer = ask(steps)
    run.losses += answer["losses"]
    run.seconds += answer["seconds"]


class Progress:
    """A live bar on a terminal; elsewhere, and on a dumb one, a line for every tenth of the work."""

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self._total = total
        self._stream = stream
        self._is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._start = time.perf_counter()
        self._shown: tuple[int, str] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._is_live:
            self._stream.write("\n")

    def show(self, runs: Sequence[Run], phase: str) -> None:
        """Draw the state of the runs; ``phase`` names the work of this moment, unless it is training."""
        # The missing steps of a failed run count as done, so that the bar reaches its end.
        each = self._total // len(runs)
        share = sum(each if run.failure else len(run.losses) for run in runs) / self._total
        shown, self._shown = self._shown, (int(share * 10), phase)
        last = {run.engine: "failed" if run.failure else f"{run.losses[-1]:.4f}" if run.losses else "-" for run in runs}
        losses = "  ".join(f"{engine} {loss}" for engine, loss in last.items())
        bar = "█" * round(share * 20)
        line = f"[{bar:·<20}] {share:4.0%} {time.perf_counter() - self._start:4.0f} s  {losses}  {phase}".rstrip()
        if self._is_live:
            # Zero where a terminal does not say.
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
            print("\r\x1b[K" + line[: max(20, columns - 1)], end="", file=self._stream, flush=True)
        elif shown != self._shown:
            print(line, file=self._stream, flush=True)


def make_table(runs: Sequence[Run]) -> Table:
    """Return the table of results."""
    head = ("engine", "steps/s", "first step", "full speed", "peak memory", "capture", "graph breaks", "final loss")
    return Table(head, tuple((run.engine, *_cells(run, len(head) - 1)) for run in runs))


def _cells(run: Run, count: int) -> tuple[str, ...]:
    if run.failure:
        return ("failed",) * count
    facts = run.summary
    capture, breaks = facts["capture_seconds"], facts["graph_breaks"]
    return (
        f"{facts['steps_per_second']:.2f}",
        f"{facts['time_to_first_step']:.2f} s",
        f"{facts['time_to_full_speed']:.2f} s",
        f"{facts['peak_memory_bytes'] / 2**20:.0f} MiB",
        "-" if capture is None else f"{capture:.2f} s",
        "-" if breaks is None else str(breaks),
        f"{facts['final_loss']:.6f}",
    )


def compare(runs: Sequence[Run]) -> tuple[list[str], bool]:
    """Return sentences on how each engine's losses compare with eager's, and whether Dovetail keeps its promise.

    The promise: ``dovetail-aten`` is equal to eager to the last bit, losses and final weights; ``dovetail-inductor``
    stays within a relative 1e-4 over the first 50 steps. A failed engine breaks it as well.
    """
    remarks = [f"{run.engine} failed: {run.failure}" for run in runs if run.failure]
    agreed = not remarks
    eager = next((run for run in runs if run.engine == "eager" and not run.failure), None)
    if eager is None:
        return [*remarks, "no run of eager to compare with"], agreed
    for run in runs:
        if run is eager or run.failure:
            continue
        deviations = relative_deviations(run.losses, eager.losses)
        early, worst = max(deviations[:CHECKED_STEPS]), max(deviations)
        same_weights = run.summary["weights_sha256"] == eager.summary["weights_sha256"]
        if worst == 0.0 and same_weights:
            sentence = f"all {len(run.losses)} losses and the final weights are bitwise equal to eager's"
        elif worst == 0.0:
            sentence = "all losses are bitwise equal to eager's, but the final weights differ"
        else:
            sentence = f"largest relative deviation of the loss from eager's: {early:.1e} in the first "
            sentence += f"{min(CHECKED_STEPS, len(deviations))} steps, {worst:.1e} in all {len(deviations)}"
        kept = {"dovetail-aten": worst == 0.0 and same_weights, "dovetail-inductor": early <= INDUCTOR_TOLERANCE}.get(
            run.engine, True
        )
        agreed = agreed and kept
        remarks.append(f"{run.engine}: {sentence}" + ("" if kept else " (MORE THAN PROMISED)"))
    return remarks, agreed


def write_results(
    output: Path, settings: Sequence[Settings], runs: Sequence[Run], table: Table, remarks: Sequence[str]
) -> list[Path]:
    """Write ``results.json``, ``trace.json`` and ``curves.html``; return their paths."""
    finished = [run for run in runs if not run.failure]

    def curve(run: Run, values: Sequence[float]) -> Curve:
        return Curve(run.engine, tuple(values), ENGINES.index(run.engine))

    losses = [curve(run, run.losses) for run in finished]
    milliseconds = [curve(run, [1e3 * item for item in run.seconds]) for run in finished]
    eager = next((run for run in finished if run.engine == "eager"), None)
    deviations = [
        curve(run, relative_deviations(run.losses, eager.losses))
        for run in finished
        if eager is not None and run is not eager
    ]
    rows: list[dict[str, Any]] = []
    results = []
    for number, run in enumerate(runs):
        facts = {name: value for name, value in run.summary.items() if name != "trace"}
        results.append({**asdict(run), "summary": facts})
        name = {"name": "process_name", "ph": "M", "pid": number, "args": {"name": run.engine}}
        rows += [name, *({**row, "pid": number} for row in run.summary.get("trace", ()))]
    about = {
        "settings": {name: value for name, value in asdict(settings[0]).items() if name != "engine"},
        "machine": machine(),
        # JSON has no infinities and no NaN.
        "runs": json.loads(json.dumps(results), parse_constant=lambda _: None),
        "remarks": list(remarks),
    }
    results_path, trace_path = output / "results.json", output / "trace.json"
    results_path.write_text(json.dumps(about, indent=1), encoding="utf-8")
    trace_path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}), encoding="utf-8")
    charts = [
        chart(losses, title="Training loss", unit="loss"),
        chart(milliseconds, title="Time of each step", unit="milliseconds", logarithmic=True),
        chart(deviations, title="Deviation from eager", unit="relative deviation", logarithmic=True),
    ]
    page = write_html(output / "curves.html", title=_heading(settings[0]), charts=charts, table=table, remarks=remarks)
    return [page, results_path, trace_path]


def machine() -> dict[str, Any]:
    """Return facts about the machine that the numbers were measured on."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def _heading(settings: Settings) -> str:
    return (
        f"Dovetail demo: GPT, {settings.layers} layers, width {settings.width}, {settings.heads} heads, "
        f"block {settings.block}, batch {settings.batch}, {settings.steps} steps, {settings.threads} threads"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in ENGINES:
            raise argparse.ArgumentTypeError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    return names
