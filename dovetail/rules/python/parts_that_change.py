"""Code that was compiled as often as it may be: it runs for real up to where it reads something else at each call, and what
follows is compiled. A sample of a replay buffer is taken apart so, while the network is trained on it in a graph.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

from dovetail.errors import RecompileLimitWarning, UserLocation
from dovetail.face.continuation import Continuation
from dovetail.face.dispatcher import SURROUNDINGS, Dispatcher, Run
from dovetail.face.warnings import name_of, warn_user
from dovetail.frontend.code.bind import bind
from dovetail.frontend.code.frame import Frame
from dovetail.frontend.code.points import flatten, unflatten
from dovetail.frontend.interpreter.generator import cleans_up
from dovetail.frontend.interpreter.machine import Machine
from dovetail.frontend.interpreter.user_code import is_user_function

#: Of a function that has such a part, later parts are compiled so often, and so many of them go on for real.
_MOST_LATER, _MOST_PARTS = 4, 8
#: The parts, each with whether it may go on.
_PARTS: weakref.WeakKeyDictionary[Dispatcher, bool] = weakref.WeakKeyDictionary()
_EVENT = "part that changes"


def go_on_for_real(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """The call, where another entry would be one too many."""
    options, events = dispatcher.options, dispatcher.events
    if options.fullgraph or options.at_recompile_limit == "error" or dispatcher._says_compiling:
        return None
    is_later = type(dispatcher) is Continuation and events.count(_EVENT)
    most = min(options.recompile_limit, _MOST_LATER) if is_later else options.recompile_limit
    entries = dispatcher.entries
    if len(entries) < most or any(map(cleans_up, args)) or any(entry.run is None for entry in entries):
        return None
    failures = entries[0].checker.explain(dispatcher.original, args, kwargs)
    if dispatcher not in _PARTS:
        _PARTS[dispatcher] = events.count(_EVENT) < _MOST_PARTS
        text = f"{name_of(dispatcher.original)} has been compiled {len(entries)} times (recompile_limit)"
        reason = str(failures[0]) if failures else "unknown"
        if _PARTS[dispatcher]:
            events.note(_EVENT, reason=reason)
            warn_user(
                f"{text} and runs eagerly up to that for new inputs; the last reason: {reason}", RecompileLimitWarning
            )
    if not _PARTS[dispatcher]:
        return None
    frames = _frames(dispatcher, args, kwargs)
    where = failures[0].location if failures else None
    return None if frames is None else functools.partial(_go_on, dispatcher, frames, where)


SURROUNDINGS.append(go_on_for_real)


def _frames(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Frame] | None:
    """The frames in which the code begins; None for a module, and for what is no function of Python."""
    function: Any = dispatcher.original
    if type(dispatcher) is Continuation:
        return unflatten(function.point, args)
    if type(function) is types.MethodType:
        function, args = function.__func__, (function.__self__, *args)
    if type(function) is not types.FunctionType or not is_user_function(function):
        return None
    return [Frame(function, bind(function, args, kwargs, _default))]


def _default(function: types.FunctionType, name: str, position: int | None) -> Any:
    return (function.__kwdefaults__ or {})[name] if position is None else (function.__defaults__ or ())[position]


def _go_on(dispatcher: Any, frames: list[Frame], where: UserLocation | None) -> Any:
    result = _run_behind(frames, where)
    if not frames:
        return result
    point, live = flatten(frames)
    return dispatcher._go_on(point, [live])


def _run_behind(frames: list[Frame], where: UserLocation | None) -> Any:
    """Run the innermost frame to behind a line, its current one where the line is in other code."""
    frame, result = frames[-1], None
    lines = {
        item.positions.lineno for item in frame.decoded.instructions[frame.position :] if item.positions is not None
    }
    is_here = where is not None and where.file == frame.code.co_filename and where.line in lines
    line, is_reached = where.line if where is not None and is_here else frame.line(), False
    while frames and frames[-1] is frame:
        is_reached = is_reached or frame.line() == line
        if is_reached and frame.line() != line:
            break
        result = Machine().step(frames)
    return result
