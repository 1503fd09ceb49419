"""The rest of a function after a graph break, as a callable of the live values.

A :class:`Resumption` is captured like any function, with guards on its arguments, and run for real where it cannot be captured.
"""

from __future__ import annotations

import types
from typing import Any

from dovetail.frontend.code.frame import Frame, Unread
from dovetail.frontend.code.points import ResumePoint, location_of, unflatten
from dovetail.frontend.interpreter.machine import Machine
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.guards import ArgumentSource, AttributeSource, Identity


class Resumption:
    """The rest of a function after a graph break, as a callable of the live values."""

    def __init__(self, point: ResumePoint, names: tuple[str, ...]) -> None:
        self.point = point
        self.names = names
        where = location_of(point)
        self.__name__ = point[0].code.co_name
        self.__qualname__ = f"{point[0].code.co_qualname} (going on at line {where.line})"
        self.__module__ = str(point[0].code.co_filename)
        self.__doc__ = None

    def __call__(self, *values: Any) -> Any:
        """Run the rest for real."""
        return Machine().run(unflatten(self.point, values))

    def traced_frames(self, interpreter: TracingInterpreter, values: tuple[Any, ...]) -> tuple[Frame, ...]:
        """The frames for a trace: every value with its source, locals not read before the trace reads them."""
        reader = interpreter.values
        sources = [ArgumentSource(position, name) for position, name in enumerate(self.names)]
        left = iter(zip(values, sources, strict=True))
        traced: list[Any] = []
        for item in self.point:
            closure_source: Any = None
            if item.function is None:
                function, closure_source = next(left)
                reader.note(function, closure_source)
                for name in ("__code__", "__globals__"):
                    reader.guard(
                        AttributeSource(closure_source, name), Identity(getattr(function, name)), "the function's code"
                    )
                interpreter.note_closure(function, closure_source)
                traced.append(function)
            traced += [Unread(value, source) for value, source in (next(left) for _ in item.local_names)]
            for _, _bound in item.cells:
                cell, source = next(left)
                interpreter.note_cell(cell, source)
                traced.append(cell)
            count = item.depth - len(item.nulls) + sum(item.exceptions)
            for value, source in (next(left) for _ in range(count)):
                if isinstance(value, types.CellType):
                    interpreter.note_cell(value, source)
                traced.append(reader.read(value, source))
        return tuple(unflatten(self.point, traced))
