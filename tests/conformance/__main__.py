"""Everything that compares Dovetail with eager at length, one after another; one table goes into ``docs/conformance.md``.

``python -m tests.conformance`` runs all of it, which takes a night on two cores; ``--only calls,modules`` some of it. The table
keeps the rows of suites that did not run, with the commit at which they ran.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.conformance.verdicts import VERDICTS

ROOT = Path(__file__).parents[2]
PAGE, ROWS = ROOT / "docs" / "conformance.md", ROOT / "docs" / "conformance.json"
_WITH_JOBS = ("opinfo_runner", "calls_runner", "module_runner", "model_runner")


@dataclass(frozen=True)
class Suite:
    """A command of this package, what it compares, and on which backend."""

    name: str
    title: str
    backend: str
    command: tuple[str, ...]


def _suite(name: str, title: str, backend: str, *command: str) -> Suite:
    return Suite(name, title, backend, command)


_OPINFO, _CALLS, _MODULES = (f"tests.conformance.{name}_runner" for name in ("opinfo", "calls", "module"))
SUITES = (
    _suite("opinfo", "operators (OpInfo), two samples", "aten", _OPINFO),
    _suite("opinfo-double", "operators, second order", "aten", _OPINFO, "--direction", "double"),
    _suite(
        "opinfo-inductor",
        "operators, one sample",
        "inductor",
        _OPINFO,
        "--compiler",
        "dovetail-inductor",
        "--samples",
        "1",
    ),
    _suite(
        "opinfo-double-inductor",
        "operators, second order, one sample",
        "inductor",
        _OPINFO,
        "--compiler",
        "dovetail-inductor",
        "--direction",
        "double",
        "--samples",
        "1",
    ),
    _suite("calls", "calls of torch's functions in all forms", "aten", _CALLS),
    _suite("calls-eager", "calls in all forms", "eager", _CALLS, "--compiler", "dovetail-eager"),
    _suite(
        "calls-inductor",
        "calls in all forms, one list",
        "inductor",
        _CALLS,
        "--compiler",
        "dovetail-inductor-with-breaks",
        "--samples",
        "1",
    ),
    _suite("modules", "modules", "aten", _MODULES),
    _suite(
        "modules-inductor",
        "modules, two samples",
        "inductor",
        _MODULES,
        "--compiler",
        "dovetail-inductor",
        "--samples",
        "2",
    ),
    _suite("models", "models of transformers", "aten", "tests.conformance.model_runner", "--models", "all"),
    _suite("switches", "switches of torch and Python", "aten", "tests.conformance.switch_runner"),
    _suite("cache", "the cache: writers killed, entries damaged", "inductor", "tests.conformance.cache_stress"),
    _suite("fuzz", "random programs", "aten", "tests.fuzz", "--count", "20000"),
)


@dataclass(frozen=True)
class Row:
    """What became of a suite."""

    name: str
    result: str
    minutes: float
    day: str
    commit: str
    torch: str


def outcome(output: str) -> str:
    """One line for the output of a suite: its totals, else its last line.

    >>> outcome("plain     40   2   0   1106   0   130   96.3")
    'plain: 1106 passed, 40 wrong, 2 error'
    """
    number = r"\s+(\d+)" * len(VERDICTS)
    found = []
    for variant, *counts in re.findall(rf"^([a-z]+){number}\s+[\d.-]+$", output, re.MULTILINE):
        by_verdict = dict(zip(VERDICTS, map(int, counts), strict=True))
        bad = [f", {by_verdict[verdict]} {verdict}" for verdict in ("wrong", "error", "refused") if by_verdict[verdict]]
        found.append(f"{variant}: {by_verdict['passed']} passed{''.join(bad)}")
    lines = output.strip().splitlines()
    return "; ".join(found) or (lines[-1] if lines else "nothing was printed")


def run(suite: Suite, jobs: int) -> Row:
    """Run a suite; its output goes to this terminal too."""
    command = [sys.executable, "-W", "ignore", "-m", *suite.command]
    if suite.command[0].endswith(_WITH_JOBS):
        command += ["-j", str(jobs)]
    started, lines = time.monotonic(), []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    minutes = round((time.monotonic() - started) / 60, 1)
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return Row(suite.name, outcome("".join(lines)), minutes, day, commit.stdout.strip(), torch.__version__)


def page(rows: dict[str, Row]) -> str:
    """The page of the docs."""
    lines = [
        "# Conformance",
        "",
        "Eager is the oracle. `make conformance` runs these suites and writes this page; `tests/conformance/README.md` says",
        "what each compares. A suite that has not run has no row. *Wrong* is whatever differs in any way: on `aten` a rounding, a",
        "version counter, or a stride of a dimension of size 1 too. *Error* also counts what is not one graph on `inductor`.",
        "",
        "| suite | backend | result | minutes | day | commit | torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for suite in SUITES:
        row = rows.get(suite.name)
        if row is not None:
            cells = (suite.title, suite.backend, row.result, row.minutes, row.day, row.commit, row.torch)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--only", help=f"suites, separated by commas: {', '.join(suite.name for suite in SUITES)}")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes at a time")
    chosen = parser.parse_args(arguments)
    wanted = chosen.only.split(",") if chosen.only else [suite.name for suite in SUITES]
    unknown = set(wanted) - {suite.name for suite in SUITES}
    if unknown:
        parser.error(f"no suite is called {', '.join(sorted(unknown))}")
    rows = {entry["name"]: Row(**entry) for entry in json.loads(ROWS.read_text())} if ROWS.exists() else {}
    for suite in SUITES:
        if suite.name in wanted:
            rows[suite.name] = run(suite, chosen.jobs)
            # After each suite, so that an interrupted night keeps what it has found.
            ROWS.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1) + "\n")
            PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
