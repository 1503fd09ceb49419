"""``python -m tests.testing.tables PAGE``: runs all backends through the suite and writes their tables between a page's marks."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dovetail.backends import lookup_backend
from dovetail.backends.cudagraphs import simulated_recorder
from dovetail.testing import check_backend
from dovetail.testing.cases import GROUPS, CaseResult
from dovetail.testing.report import Report, shortened
from dovetail.testing.suite import cases_for, probe_backends, run_cases

BEGIN = "<!-- tables: written by `make backend-tables` -->"
END = "<!-- end of tables -->"
WRONG = ("failed", "crashed", "timed out")
#: The number of wrong and refused cases that the page lists for each backend.
SHOWN = 12


@dataclass(frozen=True)
class Row:
    """One backend of the page with its options; ``label`` tells rows of one backend apart."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        return self.label or self.name


def _recorded(kernels: str) -> Row:
    # Without a warm-up every case replays what it has recorded, those that call once too.
    options = {"kernels": kernels, "recorder": "simulated", "warm_ups": 0}
    return Row("cudagraphs", options, f"cudagraphs over {kernels}, simulated recorder")


ROWS: tuple[Row, ...] = (
    Row("aten"),
    Row("eager"),
    Row("inductor"),
    Row("cudagraphs", {"kernels": "aten"}, "cudagraphs over aten"),
    Row("cudagraphs", {"kernels": "inductor"}, "cudagraphs over inductor"),
    _recorded("aten"),
    _recorded("inductor"),
    Row("check_operators", {"inner": "aten"}),
    Row("float64"),
    Row("bisect", {"inner": "aten"}),
    Row("onnxruntime"),
    Row("openvino"),
    *map(
        Row,
        (
            "aot_eager",
            "aot_eager_default_partitioner",
            "aot_eager_decomp_partition",
            "aot_eager_decomp_partition_crossref",
            "aot_ts",
            "eager_noexcept",
            "eager_debug",
            "invoke_subgraph",
            "pre_dispatch_eager",
            "ts",
            "tvm",
            "openxla",
            "openxla_eval",
        ),
    ),
)


def replace_tables(page: str, text: str) -> str:
    """Return ``page`` with ``text`` between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{text.strip()}\n{END}{after}"


@dataclass(frozen=True)
class Entry:
    """A backend on the page: its name there, its report, and a sentence below the table."""

    label: str
    report: Report
    note: str = ""


def tables(entries: Sequence[Entry]) -> str:
    """Return one table of several backends for a page, then the promise and the wrong and refused cases of each."""
    lines = [f"| backend | conforms | {' | '.join(GROUPS)} |", f"|---|---|{'---|' * len(GROUPS)}"]
    for entry in entries:
        cells = dict.fromkeys(GROUPS, "")
        for group, size, counts in entry.report.counts():
            words = [f"{counts[word]} {word}" for word in ("refused", *WRONG) if counts[word]]
            cells[group] = ", ".join([f"{counts['passed']}/{size}", *words])
        verdict = "yes" if entry.report.passed else "no"
        lines.append(f"| `{entry.label}` | {verdict} | {' | '.join(cells.values())} |")
    for entry in entries:
        lines += ["", f"`{entry.label}` promises {entry.report.promise()}."]
        lines += [entry.note] if entry.note else []
        shown = [*entry.report.failures, *entry.report.refusals]
        lines += ["", *(f"- {shortened(result)}" for result in shown[:SHOWN])] if shown else []
        lines += [f"- and {len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
    return "\n".join(lines) + "\n"


def check_row(row: Row) -> Entry:
    """Run one row's backend through the suite; for simulated recordings, a note counts the replays."""
    if row.options.get("recorder") != "simulated":
        return Entry(str(row), check_backend(row.name, options=row.options, show=False))
    recorder = simulated_recorder(opaque=row.options["kernels"] == "inductor")
    backend = lookup_backend(row.name).with_options(row.options)
    results: list[CaseResult] = []
    silent: list[str] = []
    replays, recordings = recorder.replays, len(recorder.recordings)
    for case in cases_for(backend):
        before = recorder.replays
        results += run_cases([(row.name, case)], options=row.options, isolate=False)
        if results[-1].status == "passed" and recorder.replays == before:
            silent.append(case.name)
    note = (
        f"{len(recorder.recordings) - recordings} recordings were made and {recorder.replays - replays} times replayed; "
        f"right without any replay: {', '.join(silent) or 'none'}."
    )
    return Entry(str(row), Report(backend, tuple(results)), note)


def written_tables(rows: Sequence[Row]) -> str:
    """Return the tables of these rows; backends that are not available here are named with the reason."""
    probes = {probe.name: probe for probe in probe_backends(list(dict.fromkeys(row.name for row in rows)))}
    entries: list[Entry] = []
    absent: list[str] = []
    for row in rows:
        reason = probes[row.name].reason
        if not probes[row.name].works and any(
            sign in reason for sign in ("cannot be imported", "ImportError", "no backend")
        ):
            absent.append(f"- `{row}`: {reason[:200]}")
            continue
        entries.append(check_row(row))
        print(entries[-1].report, flush=True)
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else "no GPU"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {device}"
    text = f"With {versions}; passed of all, and how many were refused or wrong. What is refused names its reason.\n"
    if not gpu:
        text += (
            "Without a GPU `cudagraphs` runs its kernels and records nothing; the rows with the simulated recorder record and\n"
            "replay every graph on the CPU, with memory that is overwritten between replays.\n"
        )
    text += f"\n{tables(entries)}"
    if absent:
        text += "\nNot to be had where this page was made:\n\n" + "\n".join(absent) + "\n"
    return text


def main(arguments: Sequence[str]) -> int:
    """Write the page named first, with the backends (or rows) named after it, all unless given."""
    path, names = Path(arguments[0]), arguments[1:]
    rows = [row for row in ROWS if not names or row.name in names or str(row) in names]
    text = written_tables(rows)
    # Lines of the suite are named as they are in the repository, wherever that lies.
    text = text.replace(f"{Path(__file__).parents[2]}/", "")
    path.write_text(replace_tables(path.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
