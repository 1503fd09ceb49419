"""The instruction set of Python 3.11: the shared semantics plus what this version encodes in its own way."""

from __future__ import annotations

from typing import Any

from dovetail.frontend.code.frame import NULL, Frame, Instruction
from dovetail.frontend.instructions import functions, shared
from dovetail.frontend.instructions.control import for_iter, jump_if, jump_if_none, target_of
from dovetail.frontend.instructions.shared import Handler, pop_many, pushes
from dovetail.frontend.protocol import FrameRunner

TABLE: dict[str, Handler] = {}


def _load_global(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """A global name, with NULL below it where it is about to be called."""
    value = interpreter.load_global(frame, instruction.argval)
    frame.stack += [NULL, value] if instruction.arg & 1 else [value]


def load_attribute(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    """``target.name``."""
    return interpreter.load_attribute(frame.stack.pop(), instruction.argval)


def _load_method(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack += [NULL, load_attribute(interpreter, frame, instruction)]


def _keyword_names(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """The names of the next call's last arguments."""
    frame.keyword_names = frame.code.co_consts[instruction.arg]


def _call(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """A call: NULL, function and arguments are on the stack, or method, self and arguments."""
    names = frame.keyword_names
    frame.keyword_names = ()
    values = pop_many(frame, instruction.arg)
    first, second = pop_many(frame, 2)
    if first is NULL:
        function = second
    else:
        function = first
        values.insert(0, second)
    frame.stack.append(functions.call_with_names(interpreter, function, values, names))


def _call_function_ex(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """``function(*args, **kwargs)``, with NULL below the function."""
    kwargs = frame.stack.pop() if instruction.arg & 1 else {}
    _, function, args = pop_many(frame, 3)
    frame.stack.append(functions.call_with_star(interpreter, function, args, kwargs))


def _make_function(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """A new function, with the parts that the argument's bits announce."""
    code = frame.stack.pop()
    parts: dict[int, Any] = {bit: frame.stack.pop() for bit in (8, 4, 2, 1) if instruction.arg & bit}
    function = functions.new_function(interpreter, frame, code, parts.pop(8, None))
    for part, value in parts.items():
        functions.set_function_part(function, part, value)
    frame.stack.append(function)


def _send(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> int | None:
    value = frame.stack.pop()
    done, result = interpreter.send(frame.stack[-1], value)
    if done:
        frame.stack[-1] = result
        return target_of(frame, instruction)
    frame.stack.append(result)
    return None


def _jump_or_pop(wanted: bool) -> Handler:
    def handler(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> int | None:
        if interpreter.truth(frame.stack[-1]) is wanted:
            return target_of(frame, instruction)
        frame.stack.pop()
        return None

    return handler


TABLE |= {
    "PRECALL": shared.no_operation,
    "LOAD_GLOBAL": _load_global,
    "LOAD_ATTR": pushes(load_attribute),
    "LOAD_METHOD": _load_method,
    "KW_NAMES": _keyword_names,
    "CALL": _call,
    "CALL_FUNCTION_EX": _call_function_ex,
    "MAKE_FUNCTION": _make_function,
    "FOR_ITER": for_iter(0),
    "SEND": _send,
    "JUMP_IF_TRUE_OR_POP": _jump_or_pop(True),
    "JUMP_IF_FALSE_OR_POP": _jump_or_pop(False),
}
for _direction in ("FORWARD_", "BACKWARD_", ""):  # without one from 3.12 on
    TABLE[f"POP_JUMP_{_direction}IF_TRUE"] = jump_if(True)
    TABLE[f"POP_JUMP_{_direction}IF_FALSE"] = jump_if(False)
    TABLE[f"POP_JUMP_{_direction}IF_NONE"] = jump_if_none(True)
    TABLE[f"POP_JUMP_{_direction}IF_NOT_NONE"] = jump_if_none(False)
