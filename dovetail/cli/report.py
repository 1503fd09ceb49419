"""``dovetail report``: runs a script, and writes a page about everything compiled in it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from pathlib import Path

from dovetail.cli import show_error, without_numpy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("dovetail-report.html"),
        help="the page; the JSON is written beside it",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is the name of a module")
    parser.add_argument("--measure", action="store_true", help="time operators and calls too, on made-up values")
    parser.add_argument("script", help="a Python program")
    # A script needs none; argparse would name them as missing too.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments").required = False


def _missing(options: argparse.Namespace) -> str:
    """Why there is nothing to run; empty where there is."""
    if options.is_module:
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(options.script) is not None
        except (ImportError, ValueError):
            found = False
        return "" if found else f"there is no module {options.script}"
    path = Path(options.script)
    path = path / "__main__.py" if path.is_dir() else path
    return "" if path.exists() else f"there is no file {path}"


def run(options: argparse.Namespace) -> int:
    """Run the script as Python would, with its own errors and exit status."""
    # After the arguments were read: a wrong one is told without waiting for torch.
    with without_numpy():
        from dovetail.reports.running import Watcher, cannot_write

    page: Path = options.output.absolute()
    if page.is_dir():
        page /= "dovetail-report.html"
    problem = _missing(options) or cannot_write(page.parent)
    if problem:
        print(f"dovetail report: {problem}", file=sys.stderr)
        return 2
    own = os.getpid()

    def targets() -> list[Path]:
        stem = page.stem if os.getpid() == own else f"{page.stem}-{os.getpid()}"
        return [page.with_name(f"{stem}{suffix}") for suffix in (page.suffix or ".html", ".json")]

    if late := {"-o", "--output", "--measure"}.intersection(options.arguments):
        print(f"dovetail report: {min(late)} goes to {options.script}; before it, it is ours", file=sys.stderr)
    watcher = Watcher(targets, options.measure)
    sys.argv = [options.script, *options.arguments]
    try:
        if options.is_module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(options.script).resolve().parent))
            runpy.run_path(options.script, run_name="__main__")
    except Exception as error:  # noqa: BLE001  (shown as Python shows what ends a program)
        watcher.ended_with(error)
        show_error(error)
        return 1
    finally:
        watcher.write()
        if os.getpid() == own:
            print(f"wrote {targets()[0]}" if watcher.has_records else "nothing was compiled", file=sys.stderr)
    return 0
