"""Suspended frames as a static point and a flat tuple of live values.

A :data:`ResumePoint` holds code, instruction and names, and is the same at every pass through a graph break; the live values travel
beside it. Continuations are kept by their resume point.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.errors import UserLocation
from dovetail.frontend.code.frame import NULL, Frame, decode
from dovetail.frontend.code.liveness import live_locals


@dataclass(frozen=True)
class FramePoint:
    """One frame of a resume point: its facts that are the same at every pass.

    ``position`` is the next instruction. ``function`` is None where the function object travels with the values: a closure is
    another object at each pass. ``cells`` are the frame's own cells, each with whether it is bound. ``depth`` is the height of the
    stack, ``nulls`` the places on it that hold no value, ``exceptions`` says which levels of handlers hold an exception.
    """

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
"""The frames that go on after a graph break, outermost first."""


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


def frame_values(frame: Frame, number: int, count: int) -> tuple[FramePoint, list[Any], list[str]]:
    """The point and the live values of one frame of ``count``, with names to show for the values."""
    point = _point_of(frame)
    named = list(_live_values(frame, point))
    prefix = "" if number == count - 1 else f"{frame.code.co_name}."
    return point, [value for _, value in named], [prefix + name for name, _ in named]


def _point_of(frame: Frame) -> FramePoint:
    code = frame.code
    live = live_locals(code)[frame.position]
    closure = dict(zip(code.co_freevars, frame.function.__closure__ or (), strict=True))
    own_cells = [(name, cell) for name, cell in frame.cells.items() if closure.get(name) is not cell]
    travels = frame.function.__closure__ is not None or "<locals>" in frame.function.__qualname__
    return FramePoint(
        code,
        frame.position,
        None if travels else frame.function,
        tuple(name for name in frame.locals if name in live and name not in frame.cells),
        tuple((name, is_bound(cell)) for name, cell in own_cells),
        len(frame.stack),
        tuple(position for position, item in enumerate(frame.stack) if item is NULL),
        tuple(error is not None for error in frame.current_exceptions),
        tuple(frame.keyword_names),
    )


def _live_values(frame: Frame, point: FramePoint) -> Iterator[tuple[str, Any]]:
    """Names and values in the order in which :func:`unflatten` takes them."""
    if point.function is None:
        yield frame.code.co_name, frame.function
    for name in point.local_names:
        yield f"L[{name!r}]", frame.locals[name]
    for name, _ in point.cells:
        yield f"cell of {name}", frame.cells[name]
    for position, item in enumerate(frame.stack):
        if item is not NULL:
            yield f"stack[{position}]", item
    for position, error in enumerate(frame.current_exceptions):
        if error is not None:
            yield f"exception[{position}]", error


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


def is_bound(cell: types.CellType) -> bool:
    """Whether a closure cell holds a value."""
    try:
        cell.cell_contents  # noqa: B018  (an empty cell raises)
    except ValueError:
        return False
    return True


def location_of(point: ResumePoint) -> UserLocation:
    """The user's line at which the innermost frame goes on."""
    innermost = point[-1]
    frame = object.__new__(Frame)
    frame.code, frame.decoded, frame.position = innermost.code, decode(innermost.code), innermost.position
    return frame.location()
