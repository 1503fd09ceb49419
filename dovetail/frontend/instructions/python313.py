"""The instruction set of Python 3.13: NULL behind the function, pairs of variables, truth as an instruction of its own."""

from __future__ import annotations

from dovetail.frontend.code.frame import NULL, Frame, Instruction
from dovetail.frontend.instructions import python312, shared
from dovetail.frontend.instructions.control import for_iter, target_of
from dovetail.frontend.instructions.shared import Handler, pop_many, read_variable, write_variable
from dovetail.frontend.protocol import FrameRunner

SHARED_WITH = python312.SHARED_WITH

TABLE: dict[str, Handler] = {**shared.TABLE, **python312.TABLE}
for _gone in ("KW_NAMES", "FORMAT_VALUE", "LOAD_CLOSURE"):
    TABLE.pop(_gone, None)


def _load_global(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = interpreter.load_global(frame, instruction.argval)
    frame.stack += [value, NULL] if instruction.arg & 1 else [value]


def _load_attr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = interpreter.load_attribute(frame.stack.pop(), instruction.argval)
    frame.stack += [value, NULL] if instruction.arg & 1 else [value]


def _load_super_attr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = python312.super_attribute(interpreter, frame, instruction)
    frame.stack += [value, NULL] if instruction.arg & 1 else [value]


def _call(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    _call_named(interpreter, frame, instruction.arg, ())


def _call_kw(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    _call_named(interpreter, frame, instruction.arg, frame.stack.pop())


def _call_named(interpreter: FrameRunner, frame: Frame, count: int, names: tuple[str, ...]) -> None:
    values = pop_many(frame, count)
    function, first = pop_many(frame, 2)
    if first is not NULL:
        values.insert(0, first)
    frame.stack.append(shared.call_with_names(interpreter, function, values, names))


def _call_function_ex(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    kwargs = frame.stack.pop() if instruction.arg & 1 else {}
    function, _, args = pop_many(frame, 3)
    frame.stack.append(shared.call_with_star(interpreter, function, args, kwargs))


def _make_function(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    code = frame.stack.pop()
    # A function cannot get its closure later: it lies below the code, for the next instruction.
    closure = frame.stack[-1] if code.co_freevars else None
    frame.stack.append(shared.new_function(interpreter, frame, code, closure))


def _set_function_attribute(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value, function = pop_many(frame, 2)
    if instruction.arg != 8:
        shared.set_function_part(function, instruction.arg, value)
    frame.stack.append(function)


def _load_fast_load_fast(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    first, second = instruction.argval
    values = [read_variable(interpreter, frame, first), read_variable(interpreter, frame, second)]
    frame.stack += values


def _store_fast_load_fast(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    first, second = instruction.argval
    write_variable(frame, first, frame.stack.pop())
    frame.stack.append(read_variable(interpreter, frame, second))


def _store_fast_store_fast(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    first, second = instruction.argval
    write_variable(frame, first, frame.stack.pop())
    write_variable(frame, second, frame.stack.pop())


def _to_bool(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value, following = frame.stack.pop(), frame.decoded.instructions[frame.position + 1]
    if following.opname in ("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE"):
        wanted = following.opname == "POP_JUMP_IF_TRUE"
        frame.stack.append(interpreter.truth_at_jump(frame, value, target_of(frame, following), wanted))
    else:
        frame.stack.append(interpreter.truth(value))


def _compare_op(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    shared.compare_op(interpreter, frame, instruction)
    if instruction.arg & 16:
        _to_bool(interpreter, frame, instruction)


def _convert_value(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    convert = (None, str, repr, ascii)[instruction.arg]
    frame.stack.append(interpreter.call(convert, (frame.stack.pop(),), {}))


def _format_simple(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    shared.append_text(interpreter, frame, frame.stack.pop(), "")


def _format_with_spec(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value, specification = pop_many(frame, 2)
    shared.append_text(interpreter, frame, value, specification)


TABLE.update(
    {
        "LOAD_GLOBAL": _load_global,
        "LOAD_ATTR": _load_attr,
        "LOAD_SUPER_ATTR": _load_super_attr,
        "CALL": _call,
        "CALL_KW": _call_kw,
        "CALL_FUNCTION_EX": _call_function_ex,
        "MAKE_FUNCTION": _make_function,
        "SET_FUNCTION_ATTRIBUTE": _set_function_attribute,
        "LOAD_FAST_LOAD_FAST": _load_fast_load_fast,
        "STORE_FAST_LOAD_FAST": _store_fast_load_fast,
        "STORE_FAST_STORE_FAST": _store_fast_store_fast,
        "TO_BOOL": _to_bool,
        "COMPARE_OP": _compare_op,
        "CONVERT_VALUE": _convert_value,
        "FORMAT_SIMPLE": _format_simple,
        "FORMAT_WITH_SPEC": _format_with_spec,
        "FOR_ITER": for_iter(2),
        "END_FOR": shared.pop_top,
    }
)
