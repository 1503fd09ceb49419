"""Numbers and dtypes of NumPy's, such as ``numpy.float64(0.5)``: immutable, and known by what they hold."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from dovetail.frontend.rules import content_rule
from dovetail.runtime.recipe_builder import MADE_BY_CALL

#: NumPy, which torch imports where it is installed; its class of arrays and that of its numbers, or none.
NUMPY: Any = sys.modules.get("numpy")
ARRAY: tuple[type, ...] = () if NUMPY is None else (NUMPY.ndarray,)
SCALAR: tuple[type, ...] = () if NUMPY is None else (NUMPY.generic,)


def _same(value: Any) -> Any:
    return value


for _kind in set() if NUMPY is None else set(NUMPY.sctypeDict.values()):
    if issubclass(_kind, (NUMPY.number, NUMPY.bool_)):
        # Immutable, and never handed on as an input of the graph.
        MADE_BY_CALL[_kind] = lambda value: (functools.partial(_same, value), ())
        MADE_BY_CALL[type(NUMPY.dtype(_kind))] = MADE_BY_CALL[_kind]


@content_rule
def _reader(value: Any) -> Callable[[Any], Any] | None:
    if isinstance(value, SCALAR):
        return array_number if array_number(value) is not None else None
    return str if NUMPY is not None and isinstance(value, NUMPY.dtype) and value.isbuiltin == 1 else None


def array_number(value: Any) -> int | float | complex | None:
    """A number of NumPy's as a Python number; None where Python has no such number."""
    found = value.item()
    return found if type(found) in (int, float, complex) else None
