"""The instruction set of Python 3.13: NULL behind the function, pairs of variables, truth as an instruction of its own."""

from __future__ import annotations

from typing import Any

from dovetail.frontend.code.frame import NULL, Frame, Instruction
from dovetail.frontend.instructions import functions, python312, shared
from dovetail.frontend.instructions.control import for_iter, target_of
from dovetail.frontend.instructions.shared import Handler, pop_many, pushes, read_variable, write_variable
from dovetail.frontend.protocol import FrameRunner

TABLE: dict[str, Handler] = dict(python312.TABLE)


def _above_null(load: Any) -> Handler:
    """Push a value, with NULL above it where it is about to be called."""

    def handler(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
        value = load(interpreter, frame, instruction)
        frame.stack += [value, NULL] if instruction.arg & 1 else [value]

    return handler


def _call_named(interpreter: FrameRunner, frame: Frame, count: int, names: tuple[str, ...]) -> None:
    values = pop_many(frame, count)
    function, first = pop_many(frame, 2)
    if first is not NULL:
        values.insert(0, first)
    frame.stack.append(functions.call_with_names(interpreter, function, values, names))


def _call_function_ex(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    kwargs = frame.stack.pop() if instruction.arg & 1 else {}
    function, _, args = pop_many(frame, 3)
    frame.stack.append(functions.call_with_star(interpreter, function, args, kwargs))


def _make_function(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    code = frame.stack.pop()
    # A function cannot get its closure later: it lies below the code, for the next instruction.
    closure = frame.stack[-1] if code.co_freevars else None
    frame.stack.append(functions.new_function(interpreter, frame, code, closure))


def _set_function_attribute(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value, function = pop_many(frame, 2)
    if instruction.arg != 8:
        functions.set_function_part(function, instruction.arg, value)
    frame.stack.append(function)


def _load_fast_load_fast(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack += [read_variable(interpreter, frame, name) for name in instruction.argval]


def _store_fast_load_fast(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    first, second = instruction.argval
    write_variable(frame, first, frame.stack.pop())
    frame.stack.append(read_variable(interpreter, frame, second))


def _store_fast_store_fast(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    for name in instruction.argval:
        write_variable(frame, name, frame.stack.pop())


def _to_bool(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value, following = frame.stack.pop(), frame.decoded.instructions[frame.position + 1]
    if following.opname in ("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE"):
        wanted = following.opname == "POP_JUMP_IF_TRUE"
        frame.stack.append(interpreter.truth_at_jump(frame, value, target_of(frame, following), wanted))
    else:
        frame.stack.append(interpreter.truth(value))


def _compare_op(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    shared.TABLE["COMPARE_OP"](interpreter, frame, instruction)
    if instruction.arg & 16:
        _to_bool(interpreter, frame, instruction)


def _converted(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    convert = (None, str, repr, ascii)[instruction.arg]
    return interpreter.call(convert, (frame.stack.pop(),), {})


def _formatted(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> str:
    specification = frame.stack.pop() if instruction.opname == "FORMAT_WITH_SPEC" else ""
    return interpreter.formatted(frame, frame.stack.pop(), specification)


TABLE |= {
    "LOAD_GLOBAL": _above_null(lambda interpreter, frame, item: interpreter.load_global(frame, item.argval)),
    "LOAD_ATTR": _above_null(python312.load_attribute),
    "LOAD_SUPER_ATTR": _above_null(python312.super_attribute),
    "CALL": lambda interpreter, frame, item: _call_named(interpreter, frame, item.arg, ()),
    "CALL_KW": lambda interpreter, frame, item: _call_named(interpreter, frame, item.arg, frame.stack.pop()),
    "CALL_FUNCTION_EX": _call_function_ex,
    "MAKE_FUNCTION": _make_function,
    "SET_FUNCTION_ATTRIBUTE": _set_function_attribute,
    "LOAD_FAST_LOAD_FAST": _load_fast_load_fast,
    "STORE_FAST_LOAD_FAST": _store_fast_load_fast,
    "STORE_FAST_STORE_FAST": _store_fast_store_fast,
    "TO_BOOL": _to_bool,
    "COMPARE_OP": _compare_op,
    "CONVERT_VALUE": pushes(_converted),
    "FORMAT_SIMPLE": pushes(_formatted),
    "FORMAT_WITH_SPEC": pushes(_formatted),
    "FOR_ITER": for_iter(2),
    "END_FOR": shared.TABLE["POP_TOP"],
}
