"""Numbers of NumPy's, such as ``numpy.float64(0.5)``: immutable, and known by what they hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dovetail.frontend.rules import content_rule


@content_rule
def _reader(value: Any) -> Callable[[Any], Any] | None:
    if type(value).__module__ != "numpy":
        return None
    base = getattr(sys.modules.get("numpy"), "number", None)
    is_number = base is not None and isinstance(value, base) and array_number(value) is not None
    return array_number if is_number else None


def array_number(value: Any) -> int | float | complex | None:
    """A number of NumPy's as a Python number; None where Python has no such number."""
    found = value.item() if hasattr(value, "item") else None
    return found if type(found) in (int, float, complex) else None
