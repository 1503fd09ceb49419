"""One activation of a Python function: code, locals, cells, stack and the next instruction."""

from __future__ import annotations

import dis
import functools
import linecache
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import UserLocation


class _Null:
    """The value that PUSH_NULL pushes."""

    def __repr__(self) -> str:
        return "NULL"


NULL = _Null()


class Break(BaseException):
    """The program does something that cannot be captured. Not an ``Exception``: user code must not catch it."""

    def __init__(self, reason: str, advice: str = "", where: UserLocation | None = None) -> None:
        self.reason = reason
        self.advice = advice
        self.where = where
        super().__init__(reason)


@dataclass(frozen=True)
class ExceptionEntry:
    """One row of a code object's exception table; positions are indices into the instruction list."""

    start: int
    end: int
    target: int
    depth: int
    push_position: bool


@dataclass(frozen=True)
class Decoded:
    """Instructions of a code object with jump targets as indices."""

    instructions: tuple[dis.Instruction, ...]
    index_of: Mapping[int, int]
    exceptions: tuple[ExceptionEntry, ...]


@functools.lru_cache(maxsize=4096)
def decode(code: types.CodeType) -> Decoded:
    """Decode a code object once; the cache holds the 4096 latest."""
    instructions = tuple(
        item for item in dis.get_instructions(code, show_caches=False) if item.opname != "EXTENDED_ARG"
    )
    index_of: dict[int, int] = {}
    position = 0
    offsets = [item.offset for item in instructions]
    for offset in range(0, len(code.co_code) + 2, 2):
        while position < len(offsets) and offsets[position] < offset:
            position += 1
        index_of[offset] = position
    exceptions = tuple(
        ExceptionEntry(index_of[entry.start], index_of[entry.end], index_of[entry.target], entry.depth, entry.lasti)
        for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
    )
    return Decoded(instructions, index_of, exceptions)


class Frame:
    """A function being interpreted."""

    __slots__ = (
        "cells",
        "code",
        "current_exceptions",
        "decoded",
        "function",
        "globals",
        "keyword_names",
        "locals",
        "position",
        "stack",
    )

    def __init__(self, function: types.FunctionType, local_values: dict[str, Any]) -> None:
        code = function.__code__
        self.function = function
        self.code = code
        self.decoded = decode(code)
        self.globals = function.__globals__
        self.locals = local_values
        self.stack: list[Any] = []
        self.position = 0
        self.keyword_names: tuple[str, ...] = ()
        self.current_exceptions: list[BaseException | None] = []
        self.cells: dict[str, types.CellType] = {}
        for name in code.co_cellvars:
            cell = types.CellType()
            if name in local_values:
                cell.cell_contents = local_values[name]
            self.cells[name] = cell
        self.cells.update(zip(code.co_freevars, function.__closure__ or (), strict=True))

    def line(self) -> int:
        """The line number of the current instruction."""
        instructions = self.decoded.instructions
        if self.position < len(instructions):
            positions = instructions[self.position].positions
            if positions is not None and positions.lineno is not None:
                return positions.lineno
        return self.code.co_firstlineno

    def location(self) -> UserLocation:
        """The current place in the user's source."""
        line = self.line()
        text = linecache.getline(self.code.co_filename, line).strip()
        return UserLocation(self.code.co_filename, line, self.code.co_name, text)
