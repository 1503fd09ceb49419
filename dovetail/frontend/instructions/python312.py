"""The instruction set of Python 3.12: attributes and methods in one instruction, comprehensions inlined, intrinsic functions."""

from __future__ import annotations

from typing import Any

from dovetail.frontend.code.frame import NULL, Frame, Instruction, Return
from dovetail.frontend.instructions import python311, shared
from dovetail.frontend.instructions.control import for_iter, target_of
from dovetail.frontend.instructions.python311 import load_attribute
from dovetail.frontend.instructions.shared import Handler, pop_many, pushes
from dovetail.frontend.protocol import FrameRunner

TABLE: dict[str, Handler] = dict(python311.TABLE)


def super_attribute(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    """``super().name``; the name ``super`` may mean something else than the builtin."""
    function, kind, instance = pop_many(frame, 3)
    has_arguments = function is super or instruction.arg & 2
    found = interpreter.call(function, (kind, instance) if has_arguments else (), {})
    return interpreter.load_attribute(found, instruction.argval)


def _below_null(load: Any) -> Handler:
    """Push an attribute, with NULL below it where it is about to be called."""

    def handler(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
        value = load(interpreter, frame, instruction)
        frame.stack += [NULL, value] if instruction.arg & 1 else [value]

    return handler


def _load_fast_and_clear(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """Put a variable (its value, its cell, or that it is unbound) aside for an inlined comprehension."""
    name = instruction.argval
    is_read = name in frame.locals
    frame.stack.append(shared.read_variable(interpreter, frame, name) if is_read else frame.cells.get(name, NULL))
    shared.write_variable(frame, name, NULL)


def _store_slice(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value, container, start, stop = pop_many(frame, 4)
    interpreter.store_item(container, slice(start, stop), value)


def _load_slice(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    container, start, stop = pop_many(frame, 3)
    return interpreter.load_item(container, slice(start, stop))


def _send(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> int | None:
    """One step of ``yield from``; the iterator stays below the result until END_SEND."""
    done, result = interpreter.send(frame.stack[-2], frame.stack[-1])
    frame.stack[-1] = result
    return target_of(frame, instruction) if done else None


def _cleanup_throw(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """An exception thrown into a ``yield from``: the iterator's end is its result, all else goes on."""
    error = frame.stack[-1]
    if not isinstance(error, StopIteration):
        raise error
    del frame.stack[-3:]
    frame.stack += [None, error.value]


TABLE |= {
    "LOAD_ATTR": _below_null(load_attribute),
    "LOAD_SUPER_ATTR": _below_null(super_attribute),
    "LOAD_FAST_AND_CLEAR": _load_fast_and_clear,
    "RETURN_CONST": lambda interpreter, frame, item: Return(item.argval),
    "BINARY_SLICE": pushes(_load_slice),
    "STORE_SLICE": _store_slice,
    # The end of a loop is reached by falling off a generator's return only in code that Python has specialised.
    "FOR_ITER": for_iter(1),
    "END_FOR": lambda interpreter, frame, item: frame.stack.__delitem__(slice(-2, None)),
    "SEND": _send,
    "END_SEND": lambda interpreter, frame, item: frame.stack.__delitem__(-2),
    "CLEANUP_THROW": _cleanup_throw,
}
