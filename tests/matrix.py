"""The test suite with several versions of torch and Python, and one table of what passed.

``python -m tests.matrix 2.15.0:python3.12 2.13.0:python3.11`` makes an environment for each pair (torch:interpreter) below
``build/matrix``, runs the assumptions about torch there (``tests/assumptions``), then the suite, and prints the table.
Options after ``--`` are pytest's, such as folders: the default is all of ``tests``. ``--docs`` writes the table to
``docs/inside/matrix.md``. An environment that is there already is used again; ``--env 2.15.0:python3.12=FOLDER`` names one
elsewhere. Exit status 1 where anything failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "inside" / "matrix.md"


@dataclass
class Outcome:
    """What one run of pytest gave."""

    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """How many tests there were."""
        return sum(self.counts.values())


def read_report(path: Path) -> Outcome:
    """The outcome in a report of pytest (``--junit-xml``)."""
    outcome = Outcome()
    for case in ElementTree.parse(path).iter("testcase"):
        verdicts = {child.tag: child for child in case}
        verdict = next((name for name in ("failure", "error", "skipped") if name in verdicts), "passed")
        outcome.counts["failed" if verdict in ("failure", "error") else verdict] += 1
        if verdict == "skipped":
            outcome.skipped[verdicts["skipped"].get("message", "")] += 1
        elif verdict != "passed":
            outcome.failed.append(f"{case.get('classname')}::{case.get('name')}")
    return outcome


def environment(torch: str, python: str, folder: Path | None = None) -> Path:
    """The interpreter of the environment for a pair; it is made where there is none.

    The pin of torch is in the one command that installs everything, so that nothing else can pull in another version.
    """
    home = folder or BUILD / f"torch-{torch}-{Path(python).name}"
    interpreter = home / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([python, "-m", "venv", str(home)], check=True)
        install = [str(interpreter), "-m", "pip", "install", "--quiet", f"torch=={torch}", "-e", f"{ROOT}[test]"]
        subprocess.run(install, check=True)
    return interpreter


def run_tests(interpreter: Path, name: str, options: list[str]) -> Outcome:
    """Run pytest in an environment; a run that gives no report counts as one failure."""
    report = BUILD / f"{name}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *options]
    done = subprocess.run(command, cwd=ROOT, env=variables, check=False, capture_output=True, text=True)
    (BUILD / f"{name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if not report.exists():
        return Outcome(Counter(failed=1), [f"pytest ended with {done.returncode} (see {name}.log)"])
    return read_report(report)


def versions(interpreter: Path) -> tuple[str, str]:
    """The versions of torch and Python in an environment, as they say themselves."""
    code = "import platform, torch; print(torch.__version__.split('+')[0], platform.python_version())"
    done = subprocess.run([str(interpreter), "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    torch, python = done.stdout.split()
    return torch, python


def table(lines: list[tuple[str, ...]]) -> str:
    """The table as Markdown."""
    titles = ("torch", "Python", "assumptions", "passed", "failed", "skipped", "minutes")
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ("---",) * len(titles), *lines))


def main() -> int:
    """Run the pairs one after the other and print the table."""
    own, _, options = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", help="torch:interpreter")
    parser.add_argument("--env", action="append", default=[], metavar="PAIR=FOLDER", help="an environment for a pair")
    parser.add_argument("--docs", action="store_true", help=f"write the table to {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args(own.split())
    folders = dict(item.split("=", 1) for item in arguments.env)
    lines, notes, failed = [], [], 0
    for pair in arguments.pairs:
        torch, _, python = pair.partition(":")
        folder = folders.get(pair)
        interpreter = environment(torch, python or "python3", Path(folder) if folder else None)
        found = versions(interpreter)
        name = "-".join(("torch", found[0], "python", found[1]))
        begun = time.monotonic()
        assumed = run_tests(interpreter, f"{name}-assumptions", ["tests/assumptions"])
        workers = ["-n", str(os.cpu_count() or 1), "--dist", "worksteal"]
        outcome = run_tests(interpreter, name, [*workers, *(options.split() or ["tests"])])
        minutes = f"{(time.monotonic() - begun) / 60:.0f}"
        counts = [str(outcome.counts[kind]) for kind in ("passed", "failed", "skipped")]
        lines.append((*found, f"{assumed.counts['passed']} of {assumed.total}", *counts, minutes))
        failed += assumed.counts["failed"] + outcome.counts["failed"]
        notes += [f"- torch {found[0]}, Python {found[1]}: `{test}`" for test in (*assumed.failed, *outcome.failed)]
        reasons = ", ".join(f"{reason or 'no reason'} ({count})" for reason, count in outcome.skipped.most_common(6))
        notes.append(f"- torch {found[0]}, Python {found[1]}, skipped: {reasons or 'nothing'}")
        print(table(lines), flush=True)
    text = "\n".join([table(lines), "", "Failed, and why tests were skipped:", "", *notes])
    print(text)
    if arguments.docs:
        what = f"`python -m tests.matrix {' '.join(arguments.pairs)} -- {options}`".replace(" -- `", "`")
        head = f"# Versions of torch and Python\n\n{what} printed this table on {platform.machine()}, {os.cpu_count()} cores.\n\n"
        PAGE.write_text(head + text + "\n", encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
