"""``dovetail cache``: lists the entries kept between processes, and moves them to other machines."""

from __future__ import annotations

import argparse
import time

from dovetail import cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``ls``, ``stat``, ``clear``, ``export FILE`` and ``import FILE``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("ls", help="the entries, the one that was used last first")
    actions.add_parser("stat", help="where the cache is, and how large")
    actions.add_parser("clear", help="delete all entries")
    for name, text in (
        ("export", "write all entries to FILE"),
        ("import", "read entries from FILE; it holds machine code"),
    ):
        actions.add_parser(name, help=text).add_argument("file", metavar="FILE")


def run(options: argparse.Namespace) -> int:
    """Run the chosen action, and return the exit status."""
    print(_ACTIONS[options.action](options))
    return 0


def _list(options: argparse.Namespace) -> str:
    lines = []
    for entry in cache.ls():
        used = time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry.used))
        lines.append(f"{entry.kind:<13} {entry.key[:16]} {entry.bytes:>10,} bytes, used {used}")
    return "\n".join(lines) or "no entries"


def _stat(options: argparse.Namespace) -> str:
    found = cache.stat()
    state = "" if found.is_on else " (switched off)"
    return f"{found.directory}{state}\n{found.entries} entries, {found.bytes:,} of at most {found.limit:,} bytes"


_ACTIONS = {
    "ls": _list,
    "stat": _stat,
    "clear": lambda options: f"{cache.clear()} entries deleted",
    "export": lambda options: f"{cache.export_file(options.file)} entries written to {options.file}",
    "import": lambda options: f"{cache.import_file(options.file)} entries read from {options.file}",
}
