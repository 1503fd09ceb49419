"""Real Python frames that stand for interpreted ones: what tracebacks, ``sys._getframe`` and ``logging`` show of the program.

An interpreted frame is no frame of Python's. Code that looks at its callers, or at the traceback of an exception, would find
the interpreter there. So for each line that is to be seen there is a piece of code with the name, the file and the position of
the user's instruction; its frame is the one that is shown.

>>> code = is_shown_frame.__code__
>>> frame = shown_frame(code, {}, dis.Positions(code.co_firstlineno))[0]
>>> frame.f_code.co_name, frame.f_lineno == code.co_firstlineno
('is_shown_frame', True)
"""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import types
from collections.abc import Callable
from typing import Any

from dovetail.torch_private import packages as private_packages

#: Where a shown frame is no line of the program's.
_INTERNAL = ("dovetail.", *private_packages.TRACING_PACKAGES)

#: Constants by which the code made here is known: of a frame that only stands for one, and of one that really calls.
_STANDS, _CALLS = "dovetail: stands for a frame", "dovetail: calls for a frame"
_PLACEHOLDER = "dovetail: what is called"


def _positions(place: dis.Positions, first: int) -> dict[str, Any]:
    """The position of a node of a syntax tree, for code that is then said to begin at the line ``first``."""
    line, earlier = place.lineno or first, first - 1
    return {
        "lineno": line - earlier,
        "end_lineno": (place.end_lineno or line) - earlier,
        "col_offset": place.col_offset or 0,
        "end_col_offset": place.end_col_offset or 0,
    }


def _named(made: types.CodeType, code: types.CodeType, first: int, mark: str) -> types.CodeType:
    return made.replace(
        co_name=code.co_name, co_qualname=code.co_qualname, co_firstlineno=first, co_consts=(*made.co_consts, mark)
    )


@functools.lru_cache(maxsize=4096)
def _standing_code(code: types.CodeType, place: dis.Positions) -> tuple[types.CodeType, int]:
    """Code of a generator that yields at a place, and the offset of that instruction."""
    tree = ast.parse("def shown(): yield")
    for node in ast.walk(tree):
        for name, value in _positions(place, place.lineno or 1).items():
            setattr(node, name, value)
    module = compile(tree, code.co_filename, "exec")
    made = next(item for item in module.co_consts if isinstance(item, types.CodeType))
    offset = next(item.offset for item in dis.get_instructions(made) if item.opname == "YIELD_VALUE")
    return _named(made, code, place.lineno or 1, _STANDS), offset


@functools.lru_cache(maxsize=4096)
def _calling_template(code: types.CodeType, place: dis.Positions) -> tuple[types.CodeType, int]:
    """Code that calls a constant of its own at a place, and the number of the constant."""
    # Lines are counted from the first one of the code.
    first = code.co_firstlineno if (place.lineno or 1) >= code.co_firstlineno else 1
    spot = _positions(place, first)
    # The compiler warns of a call of a constant, but not of this.
    constants = [ast.Constant(value, **spot) for value in (True, _PLACEHOLDER, None)]
    called = ast.Call(ast.IfExp(*constants, **spot), [], [], **spot)
    # What the call compiles, as exec does, has the __future__ features of the code that calls.
    features = code.co_flags & __future__.annotations.compiler_flag
    made = compile(ast.Expression(called), code.co_filename, "eval", features, dont_inherit=True)
    return _named(made, code, first, _CALLS), made.co_consts.index(_PLACEHOLDER)


def calling_code(code: types.CodeType, place: dis.Positions, function: Callable[[], Any]) -> types.CodeType:
    """An expression that calls a function, as if it stood at a place of this code."""
    template, number = _calling_template(code, place)
    constants = template.co_consts
    return template.replace(co_consts=(*constants[:number], function, *constants[number + 1 :]))


def shown_frame(code: types.CodeType, variables: dict[str, Any], place: dis.Positions) -> tuple[types.FrameType, int]:
    """A frame without local variables, and the offset of its instruction; ``variables`` are the globals."""
    made, offset = _standing_code(code, place)
    # A frame that has run remembers its caller, and so keeps alive what that one held. This one never runs.
    return types.FunctionType(made, variables)().gi_frame, offset


def _is_made_here(frame: types.FrameType, mark: str) -> bool:
    constants = frame.f_code.co_consts
    return bool(constants) and type(constants[-1]) is str and constants[-1] == mark


def is_shown_frame(frame: types.FrameType) -> bool:
    """Whether a frame only stands for an interpreted one."""
    return _is_made_here(frame, _STANDS)


def _is_internal(frame: types.FrameType) -> bool:
    if _is_made_here(frame, _STANDS):
        return False
    name = frame.f_globals.get("__name__") or ""
    return _is_made_here(frame, _CALLS) or name.startswith(_INTERNAL)


def _chain(traceback: types.TracebackType | None, wanted: Callable[[types.FrameType], bool]) -> Any:
    """The entries of a traceback whose frames are wanted, chained again."""
    entries = []
    while traceback is not None:
        if wanted(traceback.tb_frame):
            entries.append(traceback)
        traceback = traceback.tb_next
    found: types.TracebackType | None = None
    for entry in reversed(entries):
        if entry.tb_next is not found:
            entry = types.TracebackType(found, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        found = entry
    return found


def shown_part(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The part of a traceback that may outlive a trace: frames without variables."""
    return _chain(traceback, is_shown_frame)  # type: ignore[no-any-return]


def passed_traceback(
    traceback: types.TracebackType | None, code: types.CodeType, variables: dict[str, Any], place: dis.Positions
) -> types.TracebackType:
    """A traceback without the interpreter's frames, after the exception has reached a frame of this code at this place."""
    shown, offset = shown_frame(code, variables, place)
    inner = _chain(traceback, lambda frame: not _is_internal(frame))
    return types.TracebackType(inner, shown, offset, place.lineno or 1)
