"""The command line: ``dovetail demo``, ``doctor``, ``check-backend`` and ``version``.

>>> main(["version"])  # doctest: +ELLIPSIS
dovetail ...
0
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

import torch

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; ``arguments`` are those of the process unless given."""
    # Imported here, because the subcommands read this module's package while it is still being imported.
    from dovetail.cli import demo, doctor

    parser = argparse.ArgumentParser(prog="dovetail", description="Dovetail, a training compiler for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo.add_parser(commands)
    doctor.add_parsers(commands)
    version = commands.add_parser("version", help="print the versions of Dovetail, torch and Python")
    version.set_defaults(run=lambda _options: _version())
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    status: int = options.run(options)
    return status


def _version() -> int:
    try:
        own = metadata.version("dovetail")
    except metadata.PackageNotFoundError:
        own = "(not installed)"
    print(f"dovetail {own}, torch {torch.__version__}, Python {platform.python_version()}")
    return 0
