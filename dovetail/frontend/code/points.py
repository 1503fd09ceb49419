"""The state of suspended frames as a static point and a flat tuple of live values.

A :data:`ResumePoint` is the same at every pass through a break (code, instruction, names); the live values travel beside it.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.errors import UserLocation
from dovetail.frontend.code.frame import NULL, Frame, decode
from dovetail.frontend.code.liveness import live_locals


@dataclass(frozen=True)
class FramePoint:
    """One frame of a resume point. ``function`` is None where the function object travels with the values (a closure)."""

    code: types.CodeType
    position: int
    function: types.FunctionType | None
    local_names: tuple[str, ...]
    cells: tuple[tuple[str, bool], ...]
    depth: int
    nulls: tuple[int, ...]
    exceptions: tuple[bool, ...]
    keyword_names: tuple[str, ...]


ResumePoint = tuple[FramePoint, ...]


def _travels(function: types.FunctionType) -> bool:
    return function.__closure__ is not None or "<locals>" in function.__qualname__


def frame_values(frame: Frame, number: int, count: int) -> tuple[FramePoint, list[Any], list[str]]:
    """The point and the live values of one frame, with names to show for the values."""
    code = frame.code
    live = live_locals(code)[frame.position]
    names = tuple(name for name in frame.locals if name in live and name not in frame.cells)
    closure = dict(zip(code.co_freevars, frame.function.__closure__ or (), strict=True))
    own_cells = tuple(name for name, cell in frame.cells.items() if closure.get(name) is not cell)
    prefix = "" if number == count - 1 else f"{code.co_name}."
    values: list[Any] = []
    shown: list[str] = []
    travels = _travels(frame.function)
    if travels:
        values.append(frame.function)
        shown.append(f"{prefix}{code.co_name}")
    for name in names:
        values.append(frame.locals[name])
        shown.append(f"{prefix}L[{name!r}]")
    cells: list[tuple[str, bool]] = []
    for name in own_cells:
        cell = frame.cells[name]
        cells.append((name, is_bound(cell)))
        values.append(cell)
        shown.append(f"{prefix}cell of {name}")
    nulls: list[int] = []
    for position, item in enumerate(frame.stack):
        if item is NULL:
            nulls.append(position)
        else:
            values.append(item)
            shown.append(f"{prefix}stack[{position}]")
    exceptions = []
    for position, error in enumerate(frame.current_exceptions):
        exceptions.append(error is not None)
        if error is not None:
            values.append(error)
            shown.append(f"{prefix}exception[{position}]")
    point = FramePoint(
        code,
        frame.position,
        None if travels else frame.function,
        names,
        tuple(cells),
        len(frame.stack),
        tuple(nulls),
        tuple(exceptions),
        tuple(frame.keyword_names),
    )
    return point, values, shown


def is_bound(cell: types.CellType) -> bool:
    """Whether a closure cell holds a value."""
    try:
        cell.cell_contents  # noqa: B018  (an empty cell raises)
    except ValueError:
        return False
    return True


def flatten(frames: Sequence[Frame]) -> tuple[ResumePoint, tuple[Any, ...], tuple[str, ...]]:
    """The point at which frames stand, their live values and the names to show for these."""
    points: list[FramePoint] = []
    values: list[Any] = []
    names: list[str] = []
    for number, frame in enumerate(frames):
        point, own, shown = frame_values(frame, number, len(frames))
        points.append(point)
        values += own
        names += shown
    return tuple(points), tuple(values), tuple(names)


def unflatten(point: ResumePoint, values: Sequence[Any]) -> list[Frame]:
    """Frames that stand at a point; the inverse of :func:`flatten`."""
    left = iter(values)
    frames = []
    for item in point:
        frame = object.__new__(Frame)
        frame.function = item.function if item.function is not None else next(left)
        frame.code = item.code
        frame.decoded = decode(item.code)
        frame.globals = frame.function.__globals__
        frame.locals = {name: next(left) for name in item.local_names}
        frame.namespace = None
        frame.cells = dict(zip(item.code.co_freevars, frame.function.__closure__ or (), strict=True))
        frame.cells.update((name, next(left)) for name, _ in item.cells)
        frame.stack = [NULL if position in item.nulls else next(left) for position in range(item.depth)]
        frame.current_exceptions = [next(left) if present else None for present in item.exceptions]
        frame.position = item.position
        frame.keyword_names = item.keyword_names
        frame.direct = True
        frame.step = 0
        frames.append(frame)
    return frames


def location_of(point: ResumePoint) -> UserLocation:
    """The user's line at which the innermost frame goes on."""
    innermost = point[-1]
    frame = object.__new__(Frame)
    frame.code, frame.decoded, frame.position = innermost.code, decode(innermost.code), innermost.position
    return frame.location()
