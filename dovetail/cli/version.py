"""``dovetail version``: the versions of Dovetail, torch and Python."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no flags."""


def run(options: argparse.Namespace) -> int:
    """Print the versions."""
    try:
        own = metadata.version("dovetail")
    except metadata.PackageNotFoundError:
        own = "(not installed)"
    print(f"dovetail {own}, torch {metadata.version('torch')}, Python {platform.python_version()}")
    return 0
