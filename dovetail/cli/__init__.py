"""The command line: ``dovetail demo``, ``doctor``, ``check-backend``, ``report``, ``plan``, ``cache`` and
``version``.

Each command is a module that is loaded when its command runs, so that only commands that need torch wait for it.

>>> main(["version"])  # doctest: +ELLIPSIS
dovetail ...
0
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import platform
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence

__all__ = ["main"]

#: Help by command; the module ``dovetail.cli.<command>`` has ``add_arguments(parser)`` and ``run(options)``, but for "version".
COMMANDS = {
    "demo": "train a small GPT with eager, torch.compile and Dovetail side by side",
    "doctor": "versions, compiler, GPU, and which backends work on this machine",
    "check-backend": "run a backend through the conformance suite",
    "report": "run a script, and write what was compiled in it, and why, to one page",
    "plan": "predict a training step on many GPUs, for each way to spread it over them",
    "cache": "what is kept between processes: ls, stat, clear, export, import",
    "version": "print the versions of Dovetail, torch and Python",
}


@contextlib.contextmanager
def without_numpy() -> Iterator[None]:
    """A block for Dovetail's own code, which needs no NumPy: torch says that there is none when it is imported."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy: (No module named|import of numpy)", UserWarning)
        yield


def show_error(error: BaseException) -> None:
    """Show what ended a script, as Python shows what ends a program: from the script's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(
        (*__path__, runpy.__file__, "<frozen runpy>")
    ):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def versions() -> str:
    """The versions of Dovetail, torch and Python, found without loading torch."""
    version = importlib.metadata.version
    try:
        own = version("dovetail")
    except importlib.metadata.PackageNotFoundError:
        own = "(not installed)"
    return f"dovetail {own}, torch {version('torch')}, Python {platform.python_version()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; ``arguments`` are those of the process unless given."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="dovetail", description="Dovetail, a training compiler for PyTorch.")
    parser.add_argument("--version", action="store_true", help=COMMANDS["version"])
    if given[:1] == ["--version"]:
        given[0] = "version"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if given[:1] == [name] != ["version"]:
            with without_numpy():
                module = importlib.import_module(f"dovetail.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
    if not given:
        parser.print_help()
        return 2
    options = parser.parse_args(given)
    if options.command == "version":
        print(versions())
        return 0
    try:
        status: int = module.run(options)
    except Exception as error:
        errors = sys.modules.get("dovetail.errors")
        if not isinstance(error, OSError) and (errors is None or not isinstance(error, errors.DovetailError)):
            raise
        # The message names the mistake; the frames of a command add nothing.
        print(f"dovetail {options.command}: {error}", file=sys.stderr)
        return 2
    return status
