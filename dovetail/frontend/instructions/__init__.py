"""One instruction set per Python version over shared semantics.

Statements that few models have (``match``, classes) put their instructions into the shared table from ``dovetail.rules.language``.
An instruction set is a table from opcode name to ``handler(interpreter, frame, instruction)``. A handler returns None to go
on, an ``int`` to jump to that instruction index, or a :class:`Return` or :class:`Yield`.
"""

from __future__ import annotations

import importlib
import sys

from dovetail.errors import UnsupportedVersionError
from dovetail.frontend.code.frame import Return, Yield
from dovetail.frontend.instructions import control, exceptions, functions, operations  # noqa: F401  (their handlers)
from dovetail.frontend.instructions.shared import TABLE, Handler

_SETS: dict[tuple[int, int], dict[str, Handler]] = {}
SUPPORTED = ((3, 11), (3, 12), (3, 13))

__all__ = ["Handler", "Return", "Yield", "instruction_set"]


def instruction_set(version: tuple[int, int] = sys.version_info[:2]) -> dict[str, Handler]:
    """The table for a Python version; raises :class:`UnsupportedVersionError` where there is none yet."""
    if version not in SUPPORTED:
        raise UnsupportedVersionError(
            f"there is no instruction set for Python {version[0]}.{version[1]} yet",
            advice="run Dovetail on Python 3.11, 3.12 or 3.13",
        )
    own: dict[str, Handler] = importlib.import_module(f"{__name__}.python{version[0]}{version[1]}").TABLE
    known = _SETS.get(version)
    if known is None or not TABLE.keys() <= known.keys():
        known = _SETS[version] = {**TABLE, **own}
    return known
