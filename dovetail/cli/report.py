"""``dovetail report``: runs a script, and writes what was compiled in it to one page."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path


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


def run(options: argparse.Namespace) -> int:
    """Run the script as Python would; what it raises, and its exit status, are its own."""
    # After the arguments were read: a wrong one is told without waiting for torch.
    from dovetail.reports.running import Watcher, cannot_write

    page: Path = options.output.absolute()
    missing = not options.is_module and not Path(options.script).exists()
    problem = f"there is no file {options.script}" if missing else cannot_write(page.parent)
    if problem:
        print(f"dovetail report: {problem}", file=sys.stderr)
        return 2
    own = os.getpid()

    def targets() -> list[Path]:
        stem = page.stem if os.getpid() == own else f"{page.stem}-{os.getpid()}"
        return [page.with_name(f"{stem}{suffix}") for suffix in (page.suffix or ".html", ".json")]

    watcher = Watcher(targets, options.measure)
    sys.argv = [options.script, *options.arguments]
    try:
        if options.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(options.script).resolve().parent))
            runpy.run_path(options.script, run_name="__main__")
    except Exception as error:  # noqa: BLE001  (shown as Python shows what ends a program)
        watcher.ended_with(error)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    finally:
        watcher.write()
        if os.getpid() == own:
            print(f"wrote {targets()[0]}" if watcher.has_records else "nothing was compiled", file=sys.stderr)
    return 0
