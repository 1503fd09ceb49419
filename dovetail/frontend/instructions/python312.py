"""The instruction set of Python 3.12: attributes and methods in one instruction, comprehensions inlined, intrinsic functions."""

from __future__ import annotations

from typing import Any

from dovetail.frontend.code.frame import NULL, Frame, Instruction
from dovetail.frontend.instructions import intrinsics, python311, shared
from dovetail.frontend.instructions.control import for_iter, jump_if, jump_if_none, target_of
from dovetail.frontend.instructions.shared import Handler, Return, pop_many
from dovetail.frontend.protocol import FrameRunner

SHARED_WITH = (*python311.SHARED_WITH, intrinsics)

TABLE: dict[str, Handler] = dict(shared.TABLE)


def _load_global(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = interpreter.load_global(frame, instruction.argval)
    frame.stack += [NULL, value] if instruction.arg & 1 else [value]


def _load_attr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = interpreter.load_attribute(frame.stack.pop(), instruction.argval)
    frame.stack += [NULL, value] if instruction.arg & 1 else [value]


def super_attribute(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    """``super().name``; the name ``super`` may mean something else than the builtin."""
    function, kind, instance = pop_many(frame, 3)
    has_arguments = function is super or instruction.arg & 2
    found = interpreter.call(function, (kind, instance) if has_arguments else (), {})
    return interpreter.load_attribute(found, instruction.argval)


def _load_super_attr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = super_attribute(interpreter, frame, instruction)
    frame.stack += [NULL, value] if instruction.arg & 1 else [value]


def load_fast_and_clear(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """Put a variable (its value, its cell, or that it is unbound) aside for an inlined comprehension."""
    name = instruction.argval
    if name in frame.locals:
        saved = shared.read_variable(interpreter, frame, name)
    else:
        saved = frame.cells.get(name, NULL)
    frame.stack.append(saved)
    shared.write_variable(frame, name, NULL)


def return_const(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Return:
    """Return a constant."""
    return Return(instruction.argval)


def binary_slice(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """``container[start:stop]``."""
    container, start, stop = pop_many(frame, 3)
    frame.stack.append(interpreter.load_item(container, slice(start, stop)))


def store_slice(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """``container[start:stop] = value``."""
    value, container, start, stop = pop_many(frame, 4)
    interpreter.store_item(container, slice(start, stop), value)


def send(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> int | None:
    """One step of ``yield from``; the iterator stays below the result until END_SEND."""
    done, result = interpreter.send(frame.stack[-2], frame.stack[-1])
    frame.stack[-1] = result
    return target_of(frame, instruction) if done else None


def end_send(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """Drop the iterator of a ``yield from``."""
    del frame.stack[-2]


def cleanup_throw(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """An exception thrown into a ``yield from``: the iterator's end is its result, all else goes on."""
    error = frame.stack[-1]
    if not isinstance(error, StopIteration):
        raise error
    del frame.stack[-3:]
    frame.stack += [None, error.value]


def _end_for(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    del frame.stack[-2:]


TABLE.update(
    {
        "LOAD_GLOBAL": _load_global,
        "LOAD_ATTR": _load_attr,
        "LOAD_SUPER_ATTR": _load_super_attr,
        "LOAD_FAST_AND_CLEAR": load_fast_and_clear,
        "KW_NAMES": python311.keyword_names,
        "CALL": python311.call,
        "CALL_FUNCTION_EX": python311.call_function_ex,
        "MAKE_FUNCTION": python311.make_function,
        "RETURN_CONST": return_const,
        "BINARY_SLICE": binary_slice,
        "STORE_SLICE": store_slice,
        # The end of a loop is reached by falling off a generator's return only in code that Python has specialised.
        "FOR_ITER": for_iter(1),
        "END_FOR": _end_for,
        "SEND": send,
        "END_SEND": end_send,
        "CLEANUP_THROW": cleanup_throw,
        "POP_JUMP_IF_TRUE": jump_if(True),
        "POP_JUMP_IF_FALSE": jump_if(False),
        "POP_JUMP_IF_NONE": jump_if_none(True),
        "POP_JUMP_IF_NOT_NONE": jump_if_none(False),
    }
)
