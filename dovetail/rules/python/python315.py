"""The instruction set of Python 3.15: two places on the stack for an iterator, and modules that are imported when first used."""

from __future__ import annotations

import contextlib
from typing import Any

from dovetail.frontend.code.frame import NULL, Frame, Instruction
from dovetail.frontend.instructions import SETS, exceptions, python313
from dovetail.frontend.instructions.control import target_of
from dovetail.frontend.instructions.shared import Handler
from dovetail.frontend.protocol import FrameRunner, TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.rules.python import python314

SETS[3, 15] = TABLE = dict[str, Handler](python314.TABLE)


def _get_iter(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """An iterator; the place above it is for the position in a list or tuple, which Python keeps there to be quick."""
    frame.stack += [interpreter.iterate(frame.stack.pop()), NULL]


def _for_iter(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> int | None:
    done, value = interpreter.advance(frame.stack[-2])
    if done:
        del frame.stack[-2:]
        return target_of(frame, instruction) + 2
    frame.stack.append(value)
    return None


def _send(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> int | None:
    done, frame.stack[-1] = interpreter.send(frame.stack[-3], frame.stack[-1])
    return target_of(frame, instruction) if done else None


def _cleanup_throw(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    error = frame.stack[-1]
    if not isinstance(error, StopIteration):
        raise error
    del frame.stack[-4:]
    frame.stack += [None, NULL, error.value]


def _load_global(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """Push a global; a ``lazy import`` behind the name is done now, as Python does it."""
    if type(frame.globals.get(instruction.argval)).__name__ == "lazy_import":
        eval(instruction.argval, frame.globals)
    python313.TABLE["LOAD_GLOBAL"](interpreter, frame, instruction)


def _lookup_special(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """How ``contextlib.ExitStack`` finds ``__enter__`` and ``__exit__``: as ``with`` does."""
    manager, name, otherwise = args
    return exceptions.special_method(manager, name) if python314.has_on_class(manager, name) else otherwise


if hasattr(contextlib, "_lookup_special"):
    rule[contextlib._lookup_special] = _lookup_special

TABLE |= {
    "GET_ITER": _get_iter,
    "FOR_ITER": _for_iter,
    "POP_ITER": lambda interpreter, frame, item: frame.stack.__delitem__(slice(-2, None)),
    "SEND": _send,
    "END_SEND": lambda interpreter, frame, item: frame.stack.__delitem__(slice(-3, -1)),
    "CLEANUP_THROW": _cleanup_throw,
    "LOAD_GLOBAL": _load_global,
}
