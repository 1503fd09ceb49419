"""Interpreted frames in tracebacks, and as callers of what is called for real; see :mod:`dovetail.runtime.shown_frames`."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.frontend.code.frame import Frame
from dovetail.runtime.shown_frames import calling_code, passed_traceback


def show_place(frame: Frame) -> dis.Positions:
    """The position of a frame in its source."""
    instructions = frame.decoded.instructions
    positions = instructions[frame.position].positions if frame.position < len(instructions) else None
    return dis.Positions(frame.line()) if positions is None or positions.lineno is None else positions


def passing_traceback(frame: Frame, error: BaseException) -> types.TracebackType:
    """The traceback of an exception that has reached a frame: with the frame's line, and without the interpreter's."""
    if frame.stack and type(frame.stack[-1]) is types.TracebackType:
        # Raised again as it was: it has passed this frame before.
        return frame.stack[-1]
    return passed_traceback(error.__traceback__, frame.code, frame.globals, show_place(frame))


def call_within(
    frames: Sequence[Frame], variables: Callable[[Frame], dict[str, Any]], call: Callable[[], Any]
) -> Callable[[], Any]:
    """A call to which the frames look like its callers. ``variables`` are a frame's local variables."""
    for frame in reversed(frames):
        code = calling_code(frame.code, show_place(frame), call)
        call = functools.partial(eval, code, frame.globals, variables(frame))
    return call


def while_handling(error: BaseException, call: Callable[[], Any]) -> Any:
    """Make a call while Python knows that an exception is being handled."""
    traceback, context = error.__traceback__, error.__context__
    try:
        raise error
    except BaseException:  # noqa: BLE001  (only there so that Python knows of it)
        error.__traceback__, error.__context__ = traceback, context
        return call()
