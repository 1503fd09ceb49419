"""The code after a graph break as a callable of the live values.

A :class:`Resumption` is captured like any function, with guards on its arguments, and run for real where it cannot be captured.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dovetail.frontend.code.frame import Frame, Unread
from dovetail.frontend.code.points import FramePoint, ResumePoint, location_of, unflatten
from dovetail.frontend.interpreter.machine import Machine
from dovetail.guards import ArgumentSource, Source

if TYPE_CHECKING:
    from dovetail.frontend.interpreter.interpreter import Interpreter

_Sourced = tuple[Any, Source]


class Resumption:
    """The code of a function from a resume point on. ``names`` are shown for the live values, its arguments."""

    def __init__(self, point: ResumePoint, names: tuple[str, ...]) -> None:
        self.point = point
        self.names = names
        where = location_of(point)
        self.__name__ = point[0].code.co_name
        self.__qualname__ = f"{point[0].code.co_qualname} (going on at line {where.line})"
        self.__module__ = str(point[0].code.co_filename)
        self.__doc__ = None

    def __call__(self, *values: Any) -> Any:
        """Run the code for real."""
        return Machine().run(unflatten(self.point, values))

    def traced_frames(self, interpreter: Interpreter, values: tuple[Any, ...]) -> tuple[Frame, ...]:
        """The frames for a trace, with a source for each value. Local variables are not read before the trace reads them."""
        sources = [ArgumentSource(position, name) for position, name in enumerate(self.names)]
        left = iter(zip(values, sources, strict=True))
        traced: list[Any] = []
        for item in self.point:
            traced += _traced_values(interpreter, item, left)
        return tuple(unflatten(self.point, traced))


def _traced_values(interpreter: Interpreter, point: FramePoint, left: Iterator[_Sourced]) -> Iterator[Any]:
    """The live values of one frame as a trace has them, in the order of :func:`dovetail.frontend.code.points.flatten`."""
    reader = interpreter.values
    if point.function is None:
        function, source = next(left)
        interpreter.note_closure(reader.read_closure(function, source), source)
        yield function
    for _ in point.local_names:
        yield Unread(*next(left))
    for _ in point.cells:
        cell, source = next(left)
        interpreter.note_cell(cell, source)
        yield cell
    for _ in range(point.depth - len(point.nulls) + sum(point.exceptions)):
        value, source = next(left)
        if isinstance(value, types.CellType):
            interpreter.note_cell(value, source)
        yield reader.read(value, source)
