"""The test suite with several versions of torch and Python, and one table of what passed.

``python -m tests.matrix 2.15.0:python3.12 2.13.0:python3.11`` makes an environment for each pair (torch:interpreter) below
``build/matrix``, runs the assumptions about torch there (``tests/assumptions``), then the suite, and prints the table.
Options after ``--`` are pytest's, such as folders: the default is all of ``tests``. ``--docs`` writes the table to
``docs/inside/matrix.md``, below the words that are there. An environment that is there already is used again;
``--env 2.15.0:python3.12=FOLDER`` names one elsewhere. ``--reports FOLDER`` makes the table from reports of pytest that are
there, and runs nothing: a later report of a pair replaces the verdicts of the tests that it has, and the table says so. Exit
status 1 where anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "matrix"
#: How many failures of a pair the page names.
MOST_NAMES = 30
PAGE = ROOT / "docs" / "inside" / "matrix.md"


@dataclass
class Outcome:
    """What the runs of pytest in one environment gave: verdicts by test, and what failed at first and passed in a later run."""

    verdicts: dict[str, tuple[str, str]] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> list[str]:
        """The tests that failed."""
        return [name for name, (verdict, _) in self.verdicts.items() if verdict == "failed"]

    @property
    def skipped(self) -> Counter[str]:
        """How many tests were skipped, by reason."""
        return Counter(reason for verdict, reason in self.verdicts.values() if verdict == "skipped")

    def count(self, verdict: str, inside: str = "") -> int:
        """How many tests below a package have a verdict."""
        return sum(found == verdict and name.startswith(inside) for name, (found, _) in self.verdicts.items())

    def add(self, later: Outcome) -> None:
        """A later run replaces the verdicts of its tests, also where all parameters of a test have other names now."""
        self.mended += [name for name in self.failed if later.verdicts.get(name, ("failed",))[0] == "passed"]
        known = {name.partition("[")[0] for name in self.verdicts.keys() & later.verdicts.keys()}
        again = {name.partition("[")[0] for name in later.verdicts} - known
        again -= {name.partition("[")[0] for name in later.failed}
        gone = [name for name in self.failed if name.partition("[")[0] in again]
        self.mended += [f"{name} (now with other parameters)" for name in gone]
        for name in gone:
            del self.verdicts[name]
        self.verdicts.update(later.verdicts)
        self.commits += [commit for commit in later.commits if commit not in self.commits]
        self.seconds += later.seconds


def label(torch: str, python: str) -> str:
    """What a report says about itself: the versions that ran, and the commit."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    return f"torch {torch} python {python} commit {done.stdout.strip() or 'unknown'}"


def read_report(path: Path) -> tuple[str, Outcome]:
    """The label and the outcome in a report of pytest (``--junit-xml``)."""
    outcome = Outcome()
    suite = next(ElementTree.parse(path).iter("testsuite"))
    for case in suite.iter("testcase"):
        children = {child.tag: child for child in case}
        found = next((name for name in ("failure", "error", "skipped") if name in children), "passed")
        verdict = "failed" if found in ("failure", "error") else found
        reason = children["skipped"].get("message", "") if verdict == "skipped" else ""
        outcome.verdicts[f"{case.get('classname')}::{case.get('name')}"] = (verdict, reason)
    outcome.seconds = float(suite.get("time", 0))
    outcome.commits = [suite.get("name", "").rpartition("commit ")[2]]
    return suite.get("name", ""), outcome


def together(reports: Iterable[Path]) -> dict[tuple[str, str], Outcome]:
    """The outcomes by versions of torch and Python, of reports in the order of their times."""
    found: dict[tuple[str, str], Outcome] = {}
    for path in sorted(reports, key=lambda path: next(ElementTree.parse(path).iter("testsuite")).get("timestamp", "")):
        name, outcome = read_report(path)
        words = name.split()
        found.setdefault((words[1], words[3]), Outcome()).add(outcome)
    return dict(
        sorted(found.items(), key=lambda item: [[-int(part) for part in version.split(".")] for version in item[0]])
    )


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


def run_tests(interpreter: Path, name: str, options: list[str]) -> Path | None:
    """Run pytest in an environment; the report, where it gives one."""
    report = BUILD / f"{name}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    about = ["-o", f"junit_suite_name={label(*versions(interpreter))}", f"--junit-xml={report}"]
    command = [str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", *about, *options]
    done = subprocess.run(command, cwd=ROOT, env=variables, check=False, capture_output=True, text=True)
    (BUILD / f"{name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if not report.exists():
        print(f"pytest ended with {done.returncode} (see {name}.log)")
        return None
    return report


def versions(interpreter: Path) -> tuple[str, str]:
    """The versions of torch and Python in an environment, as they say themselves."""
    code = "import platform, torch; print(torch.__version__.split('+')[0], platform.python_version())"
    done = subprocess.run([str(interpreter), "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    torch, python = done.stdout.split()
    return torch, python


def table(lines: list[tuple[str, ...]]) -> str:
    """The table as Markdown."""
    titles = ("torch", "Python", "assumptions", "passed", "failed", "skipped", "minutes", "commit")
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ("---",) * len(titles), *lines))


def page(found: dict[tuple[str, str], Outcome]) -> str:
    """The table, what failed, what passed only in a later run, and why tests were skipped."""
    lines, notes = [], []
    for (torch, python), outcome in found.items():
        inside = "tests.assumptions"
        assumed = [outcome.count(verdict, inside) for verdict in ("passed", "failed", "skipped")]
        counts = [str(outcome.count(kind)) for kind in ("passed", "failed", "skipped")]
        minutes, commits = f"{outcome.seconds / 60:.0f}", ", ".join(outcome.commits)
        lines.append((torch, python, f"{assumed[0]} of {sum(assumed)}", *counts, minutes, commits))
        pair = f"- torch {torch}, Python {python}"
        notes += [f"{pair}: `{test}` failed" for test in outcome.failed[:MOST_NAMES]]
        if len(outcome.failed) > MOST_NAMES:
            notes.append(f"{pair}: {len(outcome.failed) - MOST_NAMES} more failed")
        notes += [f"{pair}: `{test}` failed at first and passed in a later run" for test in outcome.mended]
        reasons = ", ".join(f"{reason or 'no reason'} ({count})" for reason, count in outcome.skipped.most_common(8))
        notes.append(f"{pair}, skipped: {reasons or 'nothing'}")
    return "\n".join(
        [table(lines), "", "What failed, what passed in a later run only, and why tests were skipped:", "", *notes]
    )


def run_pairs(pairs: list[str], folders: dict[str, str], options: list[str]) -> tuple[list[Path], bool]:
    """Run the pairs one after the other; their reports, and whether each run gave one."""
    reports: list[Path | None] = []
    workers = ["-n", str(os.cpu_count() or 1), "--dist", "worksteal"]
    for pair in pairs:
        torch, _, python = pair.partition(":")
        folder = folders.get(pair)
        interpreter = environment(torch, python or "python3", Path(folder) if folder else None)
        name = "torch-{}-python-{}".format(*versions(interpreter))
        reports.append(run_tests(interpreter, f"{name}-assumptions", ["tests/assumptions"]))
        reports.append(run_tests(interpreter, name, [*workers, *(options or ["tests"])]))
        print(page(together(filter(None, reports))), flush=True)
    return [report for report in reports if report is not None], None not in reports


def main() -> int:
    """Run the pairs, or read reports, and print the table."""
    own, _, options = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", help="torch:interpreter")
    parser.add_argument("--env", action="append", default=[], metavar="PAIR=FOLDER", help="an environment for a pair")
    parser.add_argument("--reports", metavar="FOLDER", help="run nothing, read the reports in this folder")
    parser.add_argument("--docs", action="store_true", help=f"write the table to {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args(own.split())
    reports, complete = sorted(Path(arguments.reports).glob("*.xml")) if arguments.reports else [], True
    if arguments.pairs:
        made, complete = run_pairs(arguments.pairs, dict(item.split("=", 1) for item in arguments.env), options.split())
        reports += made
    found = together(reports)
    text = page(found)
    print(text)
    if arguments.docs:
        words = PAGE.read_text(encoding="utf-8").partition("| torch |")[0]
        PAGE.write_text(words + text + "\n", encoding="utf-8")
    return int(not complete or any(outcome.failed for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main())
