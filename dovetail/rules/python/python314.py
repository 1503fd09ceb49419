"""The instruction set of Python 3.14: borrowed variables, small integers, special methods, templates, deferred annotations."""

from __future__ import annotations

import importlib
from typing import Any

from dovetail.frontend.code.frame import NULL, Frame, Instruction
from dovetail.frontend.instructions import SETS, exceptions, functions, operations, python313, shared
from dovetail.frontend.instructions.shared import Handler, pop_many, pushes
from dovetail.frontend.protocol import FrameRunner
from dovetail.rules.refusals import refuse

SETS[3, 14] = TABLE = dict[str, Handler](python313.TABLE)
DEFERRED_ANNOTATIONS = 16
ITEM = 26
_SPECIAL = ("__enter__", "__exit__")
# Those from ``list`` on are of Python 3.15.
_COMMON = (AssertionError, NotImplementedError, tuple, all, any, list, set, None, "", True, False, -1)


def _binary_op(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    """An operator; ``container[key]`` is one of them."""
    left, right = pop_many(frame, 2)
    if instruction.arg == ITEM:
        return interpreter.load_item(left, right)
    return interpreter.operate(operations.BINARY[instruction.arg], left, right)


def _unpack_sequence(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """Several targets; the error for too many values says how many there are where Python knows it."""
    values, expected = frame.stack[-1], f"too many values to unpack (expected {instruction.arg})"
    try:
        operations.unpack_sequence(interpreter, frame, instruction)
    except ValueError as error:
        if str(error) != expected or type(values) not in (list, tuple, dict):
            raise
        raise ValueError(f"{expected[:-1]}, got {len(values)})") from None


def has_on_class(value: Any, name: str) -> bool:
    """Whether the class of a value, or one that it inherits from, has an attribute."""
    return any(name in owner.__dict__ for owner in type(value).__mro__)


def _load_special(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """A special method for ``with``, bound, with NULL above it."""
    manager, name = frame.stack.pop(), _SPECIAL[instruction.arg]
    if not has_on_class(manager, name):
        kind = type(manager)
        module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
        text = (
            f"{module}{kind.__qualname__}' object does not support the context manager protocol (missed {name} method)"
        )
        if has_on_class(manager, "__aenter__") and has_on_class(manager, "__aexit__"):
            text += " but it supports the asynchronous context manager protocol. Did you mean to use 'async with'?"
        raise TypeError(f"'{text}")
    frame.stack += [exceptions.special_method(manager, name), NULL]


def _with_except_start(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    error, leave = frame.stack[-1], frame.stack[-5]
    return interpreter.call(leave, (type(error), error, error.__traceback__), {})


def _call_function_ex(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    function, _, args, kwargs = pop_many(frame, 4)
    if hasattr(type(args), "__iter__"):
        # Without asking for their number first, as a tuple is made from Python 3.14 on.
        args = tuple(interpreter.drain(args))
    return functions.call_with_star(interpreter, function, args, {} if kwargs is NULL else kwargs)


def _set_function_attribute(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    if instruction.arg != DEFERRED_ANNOTATIONS:
        python313.TABLE["SET_FUNCTION_ATTRIBUTE"](interpreter, frame, instruction)
        return
    annotate, function = pop_many(frame, 2)
    function.__annotate__ = annotate
    frame.stack.append(function)


def make_template(strings: tuple[str, ...], parts: tuple[tuple[Any, ...], ...]) -> Any:
    """A template of texts, and of the values between them with what Python says about each."""
    # Older Pythons, which only look up the names of instructions here, have no such module.
    library = importlib.import_module("string.templatelib")
    interpolations = [library.Interpolation(*part) for part in parts]
    return library.Template(
        *(item for pair in zip(strings, interpolations, strict=False) for item in pair), strings[-1]
    )


refuse((make_template,), "a template string keeps its values as they are", is_clean=True)


def _build_interpolation(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    """Push the arguments of ``Interpolation``; the whole template is made at once."""
    specification = frame.stack.pop() if instruction.arg & 1 else ""
    value, expression = pop_many(frame, 2)
    return value, expression, (None, "s", "r", "a")[instruction.arg >> 2], specification


TABLE |= {
    "LOAD_FAST_BORROW": shared.TABLE["LOAD_FAST"],
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": python313.TABLE["LOAD_FAST_LOAD_FAST"],
    "LOAD_SMALL_INT": pushes(lambda interpreter, frame, item: item.arg),
    "LOAD_COMMON_CONSTANT": pushes(lambda interpreter, frame, item: _COMMON[item.arg]),
    "NOT_TAKEN": shared.no_operation,
    "POP_ITER": shared.TABLE["POP_TOP"],
    "BINARY_OP": pushes(_binary_op),
    "UNPACK_SEQUENCE": _unpack_sequence,
    "LOAD_SPECIAL": _load_special,
    "WITH_EXCEPT_START": pushes(_with_except_start),
    "CALL_FUNCTION_EX": pushes(_call_function_ex),
    "SET_FUNCTION_ATTRIBUTE": _set_function_attribute,
    "BUILD_INTERPOLATION": pushes(_build_interpolation),
    "BUILD_TEMPLATE": pushes(
        lambda interpreter, frame, item: interpreter.call(make_template, tuple(pop_many(frame, 2)), {})
    ),
}
