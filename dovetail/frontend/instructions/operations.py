"""Attributes, items, operators, containers and texts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from dovetail.frontend.code.frame import NULL, Frame, Instruction
from dovetail.frontend.instructions.functions import function_name
from dovetail.frontend.instructions.shared import TABLE, handles, pop_many, pushes, unary
from dovetail.frontend.protocol import FrameRunner

# --- attributes and items ---------------------------------------------------------------------------------------------


@handles("STORE_ATTR")
def store_attr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    target = frame.stack.pop()
    interpreter.store_attribute(target, instruction.argval, frame.stack.pop())


@handles("STORE_SUBSCR")
def store_subscr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value, target, key = pop_many(frame, 3)
    interpreter.store_item(target, key, value)


TABLE |= {
    "BINARY_SUBSCR": lambda interpreter, frame, item: frame.stack.append(interpreter.load_item(*pop_many(frame, 2))),
    "DELETE_ATTR": lambda interpreter, frame, item: interpreter.delete_attribute(frame.stack.pop(), item.argval),
    "DELETE_SUBSCR": lambda interpreter, frame, item: interpreter.delete_item(*pop_many(frame, 2)),
}

# --- operators --------------------------------------------------------------------------------------------------------

#: Names and symbols, in the order of the argument of BINARY_OP.
SYMBOLS = {
    "add": "+",
    "and": "&",
    "floordiv": "//",
    "lshift": "<<",
    "matmul": "@",
    "mul": "*",
    "mod": "%",
    "or": "|",
    "pow": "** or pow()",
    "rshift": ">>",
    "sub": "-",
    "truediv": "/",
    "xor": "^",
}
#: All operators, then all of them in place.
BINARY: tuple[Callable[[Any, Any], Any], ...] = tuple(
    getattr(operator, name) for name in (*(f"__{name}__" for name in SYMBOLS), *(f"i{name}" for name in SYMBOLS))
)
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@handles("CONTAINS_OP")
def contains_op(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    item, container = pop_many(frame, 2)
    found = interpreter.truth(interpreter.operate(operator.contains, container, item))
    frame.stack.append(found ^ bool(instruction.arg))


@handles("IS_OP")
def is_op(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    left, right = pop_many(frame, 2)
    frame.stack.append((left is right or interpreter.compared(left, right)) ^ bool(instruction.arg))


TABLE |= {
    "BINARY_OP": pushes(lambda runner, frame, item: runner.operate(BINARY[item.arg], *pop_many(frame, 2))),
    "COMPARE_OP": pushes(lambda runner, frame, item: runner.operate(COMPARE[item.argval], *pop_many(frame, 2))),
    "UNARY_NOT": pushes(lambda interpreter, frame, item: not interpreter.truth(frame.stack.pop())),
    "UNARY_NEGATIVE": unary(operator.neg),
    "UNARY_POSITIVE": unary(operator.pos),
    "UNARY_INVERT": unary(operator.invert),
}

# --- containers -------------------------------------------------------------------------------------------------------


@handles("BUILD_MAP")
def build_map(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    values = pop_many(frame, 2 * instruction.arg)
    frame.stack.append(dict(zip(map(interpreter.as_key, values[::2]), values[1::2], strict=True)))


TABLE |= {
    "BUILD_TUPLE": lambda interpreter, frame, item: frame.stack.append(tuple(pop_many(frame, item.arg))),
    "BUILD_LIST": lambda interpreter, frame, item: frame.stack.append(pop_many(frame, item.arg)),
    "BUILD_CONST_KEY_MAP": pushes(
        lambda interpreter, frame, item: dict(zip(frame.stack.pop(), pop_many(frame, item.arg), strict=True))
    ),
    "BUILD_STRING": pushes(lambda runner, frame, item: runner.call("".join, (pop_many(frame, item.arg),), {})),
    "BUILD_SLICE": lambda interpreter, frame, item: frame.stack.append(slice(*pop_many(frame, item.arg))),
    "LIST_TO_TUPLE": pushes(lambda interpreter, frame, item: tuple(interpreter.drain(frame.stack.pop()))),
}


@handles("LIST_APPEND")
def list_append(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = frame.stack.pop()
    interpreter.change(frame.stack[-instruction.arg], "append", value)


@handles("MAP_ADD")
def map_add(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    key, value = pop_many(frame, 2)
    interpreter.change(frame.stack[-instruction.arg], "__setitem__", interpreter.as_key(key), value)


@handles("LIST_EXTEND")
def list_extend(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    values = frame.stack.pop()
    if not _is_iterable(values):
        raise TypeError(f"Value after * must be an iterable, not {type(values).__name__}")
    interpreter.change(frame.stack[-instruction.arg], "extend", interpreter.drain(values, is_hinted=True))


@handles("DICT_UPDATE")
def dict_update(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    values = frame.stack.pop()
    if not hasattr(type(values), "keys"):
        raise TypeError(f"{type(values).__name__!r} object is not a mapping")
    interpreter.change(frame.stack[-instruction.arg], "update", interpreter.items_of(values))


@handles("DICT_MERGE")
def dict_merge(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    values = frame.stack.pop()
    target = frame.stack[-instruction.arg]
    # Below the dictionary: the positional arguments, then the function (and before or behind it NULL, by version).
    below = frame.stack[-instruction.arg - 2]
    name = function_name(frame.stack[-instruction.arg - 3] if below is NULL else below)
    if not hasattr(type(values), "keys"):
        raise TypeError(f"{name} argument after ** must be a mapping, not {type(values).__name__}")
    for key, value in interpreter.items_of(values).items():
        if key in target:
            raise TypeError(f"{name} got multiple values for keyword argument {key!r}")
        interpreter.change(target, "__setitem__", key, value)


def _is_iterable(value: Any) -> bool:
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")


def unpacked(interpreter: FrameRunner, value: Any) -> Any:
    """The iterator over the values for several targets."""
    try:
        return interpreter.iterate(value)
    except TypeError as error:
        if _is_iterable(value):
            raise
        raise TypeError(f"cannot unpack non-iterable {type(value).__name__} object") from error


@handles("UNPACK_SEQUENCE")
def unpack_sequence(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    iterator = unpacked(interpreter, frame.stack.pop())
    expected = instruction.arg
    values: list[Any] = []
    while True:
        done, value = interpreter.advance(iterator)
        if done:
            break
        if len(values) == expected:
            raise ValueError(f"too many values to unpack (expected {expected})")
        values.append(value)
    if len(values) < expected:
        raise ValueError(f"not enough values to unpack (expected {expected}, got {len(values)})")
    frame.stack.extend(reversed(values))


# --- texts ------------------------------------------------------------------------------------------------------------


@handles("FORMAT_VALUE")
def format_value(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    specification = frame.stack.pop() if instruction.arg & 4 else ""
    value = frame.stack.pop()
    convert = (None, str, repr, ascii)[instruction.arg & 3]
    if convert is not None:
        value = interpreter.call(convert, (value,), {})
    frame.stack.append(interpreter.formatted(frame, value, specification))
