"""The sentences of warnings and errors, and the frames that a traceback shows.

A message names the user's own line first, then the line of a library that it was about. Frames of Dovetail's own are left out of
tracebacks unless ``DOVETAIL_INTERNALS=1`` is in the environment.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from dovetail.errors import DovetailError, EagerFallbackWarning, GraphBreakError, UserLocation
from dovetail.face.dispatcher import Dispatcher
from dovetail.frontend.code.frame import Break
from dovetail.runtime.function import DifferentiableGraph

INTERNALS = "DOVETAIL_INTERNALS"
_HERE = str(Path(__file__).parent.parent) + os.sep
_LIBRARIES = (
    _HERE,
    str(Path(torch.__file__).parent) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")),
)
_PACKAGES = ("site-packages", "dist-packages")
#: Functions of Dovetail in which an error is eager's own: the call by eager, and reading what autograd has saved.
_EAGERS_ERRORS = {Dispatcher._fall_back.__code__, DifferentiableGraph.saved.__code__}


@dataclass(frozen=True)
class PlaceInLibrary(UserLocation):
    """The user's line, and the line of a library that is run from there."""

    within: UserLocation | None = None

    def __str__(self) -> str:
        return f"{super().__str__()}\n  in {_short(self.within)}" if self.within else super().__str__()


def explain_break(head: str, stop: Break) -> str:
    """A graph break as a sentence with its place and what to do about it.

    >>> print(explain_break("graph break", Break("print writes to the terminal", "use logging")))
    graph break: print writes to the terminal
      what to do: use logging
    """
    text = f"{head}: {stop.reason}"
    if stop.where is not None:
        text += f"\n  at {place(stop.where)}"
    if stop.advice:
        text += f"\n  what to do: {stop.advice}"
    return text


def place(where: UserLocation | None) -> UserLocation | None:
    """The user's own line, with that of the library in it where the program has come to one; None where nothing is known."""
    if where is None or not is_library(where.file):
        return where
    own = next((frame for frame in reversed(where.stack) if not is_library(frame.file)), None) or _calling_line()
    if own is None:
        return where
    return PlaceInLibrary(own.file, own.line, own.function, own.text, where.module, where.stack, where)


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a file is of an installed package, or of Python itself.

    >>> is_library(torch.__file__), is_library("train.py"), is_library("<stdin>")
    (True, False, False)
    """
    return file.startswith((*_LIBRARIES, "<frozen")) or any(part in _PACKAGES for part in Path(file).parts)


def _calling_line() -> UserLocation | None:
    """The user's line that has called the compiled function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else UserLocation.of(frame.f_code, frame.f_lineno)


def _short(place: UserLocation) -> str:
    """A line of a library, by the path below the folder of packages."""
    parts = Path(place.file).parts
    below = [index for index, part in enumerate(parts) if part in _PACKAGES]
    file = os.path.join(*parts[below[-1] + 1 :]) if below else place.file
    return str(UserLocation(file, place.line, place.function, place.text))


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the user's line; inside of a call of a compiled function at its end, with what else it warns of."""
    if issubclass(category, EagerFallbackWarning) and _here.depth:
        _here.waiting.append((text, category))
        return
    frame: FrameType | None = sys._getframe()
    files = []
    while frame is not None:
        files.append((frame.f_code.co_filename, str(frame.f_globals.get("__name__")).split(".")[0]))
        frame = frame.f_back
    levels = range(1, len(files) + 1)
    own = (level for level in levels if not is_library(files[level - 1][0]))
    outside = (level for level in levels if files[level - 1][1] not in ("dovetail", "torch"))
    warnings.warn(text, category, stacklevel=next(own, next(outside, 1)))


class _Here(threading.local):
    """The number of calls of compiled functions that are open in this thread, and their warnings."""

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: list[tuple[str, type[Warning]]] = []


_here = _Here()


class Telling:
    """A block that tells its user of all graph breaks in one warning, of what runs eagerly as a whole in another one, and leaves
    Dovetail's frames out of errors.
    """

    def __enter__(self) -> None:
        _here.depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        _here.depth -= 1
        if isinstance(error, Exception):
            without_internals(error)
        if _here.depth or not _here.waiting:
            return
        waiting, _here.waiting = _here.waiting, []
        for category in dict.fromkeys(kind for _, kind in waiting):
            text, *more = (text for text, kind in waiting if kind is category)
            if more:
                text += (
                    f"\n  {len(more)} more in this call: DOVETAIL_LOG=breaks shows {'it' if len(more) == 1 else 'them'}"
                )
            # Where warnings are errors, the program's own error goes on: it is what eager raises.
            with contextlib.suppress(*(() if error is None else (EagerFallbackWarning,))):
                warn_user(text, category)


def without_internals(error: Exception) -> None:
    """Take Dovetail's frames between the user's call and the user's code out of an error, and what a capture met on its way."""
    if os.environ.get(INTERNALS) == "1":
        return
    if isinstance(error, GraphBreakError):
        error.__cause__, error.__suppress_context__ = None, True
    trace, last = error.__traceback__, None
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        last = trace.tb_frame.f_code
        trace = trace.tb_next
    # A call that Python itself refuses, as with an argument too few, has no frame of the user's.
    is_told = trace is not None or isinstance(error, DovetailError) or last in _EAGERS_ERRORS
    if is_told:
        error.__traceback__ = trace
