"""``dovetail plan``: predicts a training step on a number of ranks for each way to spread it, and says which is best."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from dovetail.cli import show_error, without_numpy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "--ranks", type=_numbers, required=True, help="processes, one for each GPU; or several: 8,64,1024"
    )
    parser.add_argument("--cluster", default="h100", help="a100 or h100, the default")
    parser.add_argument("--picture", type=Path, help="an SVG file, with a bar for each way")
    parser.add_argument(
        "script", help="a Python file with a function build() that returns a dovetail.simulator.Training"
    )


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"takes numbers above 0, such as 64 or 8,64,1024, not {text!r}")
    return [int(part) for part in parts]


def run(options: argparse.Namespace) -> int:
    """Print the table; exit status 2 for a script or cluster that cannot be used."""
    # After the arguments were read: a wrong one is told without waiting for torch.
    with without_numpy():
        from dovetail.simulator import CLUSTERS, Training
        from dovetail.simulator.plans import picture, plan_each, summary

    problem = ""
    if options.cluster not in CLUSTERS:
        problem = f"unknown cluster {options.cluster!r}; known are {', '.join(CLUSTERS)}"
    elif options.picture is not None and not options.picture.absolute().parent.is_dir():
        problem = f"there is no folder {options.picture.absolute().parent}"
    elif not Path(options.script).is_file():
        problem = f"there is no file {options.script}"
    build: Any = None
    if not problem:
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        sys.argv = [options.script]
        try:
            build = runpy.run_path(options.script, run_name="dovetail.plan").get("build")
            is_made = callable(build) and isinstance(build(), Training)
        except Exception as error:  # noqa: BLE001  (the script's own)
            show_error(error)
            return 1
        if not is_made:
            problem = f"{options.script} has no function build() that returns a dovetail.simulator.Training"
    if problem:
        print(f"dovetail plan: {problem}", file=sys.stderr)
        return 2
    found = []
    for plans in plan_each(build, options.ranks, CLUSTERS[options.cluster]):
        print(plans, end="\n\n", flush=True)
        found.append(plans)
    if len(found) > 1:
        print(summary(found), end="\n\n")
    print(f"{options.cluster}: {found[0].cluster.source}")
    if options.picture is not None:
        options.picture.write_text(picture(found), encoding="utf-8")
        print(f"wrote {options.picture}", file=sys.stderr)
    return 0
