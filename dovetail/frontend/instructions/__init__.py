"""One instruction set per Python version over shared semantics.

An instruction set is a table from opcode name to ``handler(interpreter, frame, instruction)``. A handler returns None to go
on, an ``int`` to jump to that instruction index, or a :class:`Return` or :class:`Yield`. Code that has an instruction without a
handler (of an ``except*``, of async code, of a class body) is never interpreted: the graph breaks before it is called.
"""

from __future__ import annotations

import sys
import types

from dovetail.errors import UnsupportedVersionError
from dovetail.frontend.code.frame import Decoded, Return, Yield, unknown_instruction
from dovetail.frontend.instructions import control, exceptions, functions, operations, python311, python312, python313  # noqa: F401
from dovetail.frontend.instructions.functions import is_known
from dovetail.frontend.instructions.shared import TABLE, Handler

_WHOLE: dict[tuple[int, int], tuple[int, dict[str, Handler]]] = {}
#: Instructions that each Python encodes in its own way; rules add those of newer Pythons.
SETS = {(3, 11): python311.TABLE, (3, 12): python312.TABLE, (3, 13): python313.TABLE}

__all__ = ["SETS", "Handler", "Return", "Yield", "handlers_of", "instruction_set"]


def instruction_set(version: tuple[int, int] = sys.version_info[:2]) -> dict[str, Handler]:
    """The table for a Python version; raises :class:`UnsupportedVersionError` where there is none yet."""
    if version not in SETS:
        raise UnsupportedVersionError(f"there is no instruction set for Python {version[0]}.{version[1]} yet")
    # Rules add handlers; nobody takes one away.
    size = len(TABLE) + len(SETS[version])
    if _WHOLE.get(version, (0,))[0] != size:
        _WHOLE[version] = size, {**TABLE, **SETS[version]}
    return _WHOLE[version][1]


def handlers_of(code: types.CodeType, decoded: Decoded) -> tuple[Handler, ...]:
    """A handler for each instruction; raises :class:`Break` for code that cannot be interpreted."""
    table = instruction_set()
    for item in decoded.instructions:
        if item.opname not in table or not is_known(item):
            raise unknown_instruction(code, item)
    return tuple(table[item.opname] for item in decoded.instructions)
