"""Warnings at the user's line, and the sentences in them."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sized
from typing import Any

from dovetail.frontend.code.frame import Break


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the user's line: the nearest one outside of this package and of torch's module calls."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("dovetail", "torch"):
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)


def explain_break(head: str, stop: Break) -> str:
    """A graph break as a sentence with its place and what to do about it; see :mod:`dovetail.reports.messages`."""
    return str(importlib.import_module("dovetail.reports.messages").explain_break(head, stop))


def name_of(function: Any) -> str:
    """A function's name in a sentence; the look-up on an object of the user's may raise anything."""
    try:
        return str(function.__qualname__)
    except Exception:  # noqa: BLE001  (an attribute of the user's own object)
        return type(function).__name__


def count(items: Sized, one: str) -> str:
    """How many there are, in words.

    >>> count([1], "compiled entry"), count([1, 2], "compiled entry")
    ('1 compiled entry', '2 compiled entries')
    """
    many = f"{one.removesuffix('y')}ies" if one.endswith("y") else f"{one}s"
    return f"{len(items)} {one if len(items) == 1 else many}"
