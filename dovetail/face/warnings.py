"""Warnings at the user's line, and the sentences in them."""

from __future__ import annotations

import importlib
from collections.abc import Sized
from typing import Any


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the user's line, which is the nearest one outside of this package and of libraries."""
    messages().warn_user(text, category)


def messages() -> Any:
    """The sentences of warnings and errors (:mod:`dovetail.reports.messages`), loaded when there is something to say."""
    return importlib.import_module("dovetail.reports.messages")


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
