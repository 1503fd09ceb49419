"""``python -m tests.testing.tables PAGE``: runs all backends through the suite and writes their tables between a page's marks."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dovetail.backends import lookup_backend
from dovetail.backends.cudagraphs import simulated_recorder
from dovetail.testing import check_backend
from dovetail.testing.cases import CaseResult
from dovetail.testing.probe import probe_backends
from dovetail.testing.report import Report, tables
from dovetail.testing.suite import cases_for, run_cases

BEGIN = "<!-- tables: written by `make backend-tables` -->"
END = "<!-- end of tables -->"


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


def check_row(row: Row) -> Report:
    """Run one row's backend through the suite; for simulated recordings, a note counts the replays."""
    if row.options.get("recorder") != "simulated":
        return replace(check_backend(row.name, options=row.options, show=False), label=row.label)
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
    return Report(backend, tuple(results), row.label, note)


def written_tables(rows: Sequence[Row]) -> str:
    """Return the tables of these rows; backends that are not available here are named with the reason."""
    probes = {probe.name: probe for probe in probe_backends(list(dict.fromkeys(row.name for row in rows)))}
    reports: list[Report] = []
    absent: list[str] = []
    for row in rows:
        reason = probes[row.name].reason
        if not probes[row.name].works and any(
            sign in reason for sign in ("cannot be imported", "ImportError", "no backend")
        ):
            absent.append(f"- `{row}`: {reason[:200]}")
            continue
        reports.append(check_row(row))
        print(reports[-1], flush=True)
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else "no GPU"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {device}"
    text = f"With {versions}; passed of all, and how many were refused or wrong. What is refused names its reason.\n"
    if not gpu:
        text += (
            "Without a GPU `cudagraphs` runs its kernels and records nothing; the rows with the simulated recorder record and\n"
            "replay every graph on the CPU, with memory that is overwritten between replays.\n"
        )
    text += f"\n{tables(reports)}"
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
