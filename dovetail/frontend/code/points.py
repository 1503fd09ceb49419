"""Suspended frames as a static point and a flat tuple of live values.

A :data:`ResumePoint` holds code, instruction and names, and is the same at every pass through a graph break; the live values travel
beside it. Continuations are kept by their resume point.
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

    def __hash__(self) -> int:  # not that of the code, which takes longest
        return hash((self.position, self.depth, self.local_names))


ResumePoint = tuple[FramePoint, ...]
"""The frames that go on after a graph break, outermost first."""


def flatten(frames: Sequence[Frame]) -> tuple[ResumePoint, tuple[Any, ...]]:
    """The point at which frames stand, and their live values."""
    points: list[FramePoint] = []
    values: list[Any] = []
    for frame in frames:
        point, own = frame_values(frame)
        points.append(point)
        values += own
    return tuple(points), tuple(values)


def frame_values(frame: Frame) -> tuple[FramePoint, list[Any]]:
    """The point and the live values of one frame, in the order in which :func:`unflatten` takes them."""
    point = _point_of(frame)
    return point, [
        *([frame.function] if point.function is None else []),
        *[frame.locals[name] for name in point.local_names],
        *[frame.cells[name] for name, _ in point.cells],
        *[item for item in frame.stack if item is not NULL],
        *[error for error in frame.current_exceptions if error is not None],
    ]


def names_of_values(point: ResumePoint) -> tuple[str, ...]:
    """Names to show for the live values at a point."""
    found: list[str] = []
    for item in point:
        names = [item.code.co_name] if item.function is None else []
        names += [f"L[{name!r}]" for name in item.local_names]
        names += [f"cell of {name}" for name, _ in item.cells]
        names += [f"stack[{place}]" for place in range(item.depth) if place not in item.nulls]
        names += [f"exception[{place}]" for place, present in enumerate(item.exceptions) if present]
        found += names if item is point[-1] else [f"{item.code.co_name}.{name}" for name in names]
    return tuple(found)


def _point_of(frame: Frame) -> FramePoint:
    code = frame.code
    live = live_locals(code)[frame.position]
    closure = dict(zip(code.co_freevars, frame.function.__closure__, strict=True)) if frame.function.__closure__ else {}
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
