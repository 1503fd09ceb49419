"""``dovetail check-backend``: runs backends through the conformance suite."""

from __future__ import annotations

import argparse

import torch

from dovetail.testing import check_backend
from dovetail.testing.cases import GROUPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="a backend's name")
    parser.add_argument("--groups", type=names, default=None, help=f"some of: {', '.join(GROUPS)}")
    parser.add_argument("--device", type=_device, default="cpu", help="where the cases' tensors are, such as cuda")


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from None
    return text


def names(text: str) -> list[str]:
    """Split a list separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def run(options: argparse.Namespace) -> int:
    """Print the report of each backend; 0 if all conform."""
    passed = True
    for name in options.names:
        report = check_backend(name, groups=options.groups, device=options.device, show=False)
        print(report, flush=True)
        passed = passed and report.passed
    return 0 if passed else 1
