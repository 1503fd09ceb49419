"""Functions, calls, imports, intrinsic functions (3.12 on), and the instructions that no captured function has."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

from dovetail.frontend.code.frame import Break, Frame, Instruction
from dovetail.frontend.instructions.shared import Handler, handles, pop_many, unary
from dovetail.frontend.protocol import FrameRunner


def new_function(interpreter: FrameRunner, frame: Frame, code: types.CodeType, closure: Any) -> types.FunctionType:
    """A new function object, with the frame's globals."""
    function = types.FunctionType(code, frame.globals, code.co_name, None, closure)
    function.__qualname__ = code.co_qualname
    interpreter.created(function)
    return function


def set_function_part(function: types.FunctionType, part: int, value: Any) -> None:
    """Give a new function its positional defaults (1), keyword-only defaults (2) or annotations (4)."""
    if part == 1:
        function.__defaults__ = value
    elif part == 2:
        function.__kwdefaults__ = value
    else:
        pairs = value if isinstance(value, dict) else dict(zip(value[::2], value[1::2], strict=True))
        function.__annotations__ = pairs


def call_with_names(interpreter: FrameRunner, function: Any, values: list[Any], names: tuple[str, ...]) -> Any:
    """Call a function; the last of the values are keyword arguments with these names."""
    count = len(values) - len(names)
    keywords = dict(zip(names, values[count:], strict=True))
    return interpreter.call(function, tuple(values[:count]), keywords, direct=True)


def call_with_star(interpreter: FrameRunner, function: Any, args: Any, kwargs: Any) -> Any:
    """``function(*args, **kwargs)``."""
    kind = type(args)
    if not hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
        raise TypeError(f"{function_name(function)} argument after * must be an iterable, not {kind.__name__}")
    if not hasattr(type(kwargs), "keys"):
        raise TypeError(f"{function_name(function)} argument after ** must be a mapping, not {type(kwargs).__name__}")
    args = tuple(interpreter.drain(args, is_hinted=True))
    keywords = dict(interpreter.items_of(kwargs))
    if not all(isinstance(key, str) for key in keywords):
        raise TypeError("keywords must be strings")
    return interpreter.call(function, args, keywords, direct=True)


def function_name(function: Any) -> str:
    """A function as Python's own errors name it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(name, str):
        return str(function) if isinstance(function, type) else f"{type(function).__name__} object"
    return f"{name}()" if module in (None, "builtins") else f"{module}.{name}()"


@handles("IMPORT_NAME")
def import_name(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    level, names = pop_many(frame, 2)
    frame.stack.append(interpreter.import_module(frame, instruction.argval, names, level))


@handles("IMPORT_FROM")
def import_from(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    try:
        value = interpreter.load_attribute(frame.stack[-1], instruction.argval)
    except AttributeError as error:
        raise ImportError(f"cannot import name {instruction.argval!r}") from error
    frame.stack.append(value)


@handles("ASYNC_GEN_WRAP", "BEFORE_ASYNC_WITH", "END_ASYNC_FOR", "GET_AITER", "GET_ANEXT", "GET_AWAITABLE")
def refuse_async(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    raise Break(f"{frame.code.co_qualname} is async ({instruction.opname})", "keep async code outside of the function")


@handles("IMPORT_STAR", "PRINT_EXPR")
def refuse_module_code(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    raise Break(f"{instruction.opname} belongs to the code of a module", "call a function")


@handles("ENTER_EXECUTOR", "EXIT_INIT_CHECK", "INTERPRETER_EXIT", "RESERVED")
def refuse_internal(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    raise Break(f"{instruction.opname} is put into code by Python's own interpreter only", "call a function")


def _stop_iteration_error(error: BaseException) -> BaseException:
    """The error that leaves a generator in the place of a StopIteration."""
    if not isinstance(error, StopIteration):
        return error
    raised = RuntimeError("generator raised StopIteration")
    raised.__cause__ = raised.__context__ = error
    return raised


_OTHERS: dict[int, Handler] = {
    1: refuse_module_code,
    2: refuse_module_code,
    4: refuse_async,
    5: unary(operator.pos),
}
#: Functions of one and of two values, by number.
ONE: dict[int, Callable[[Any], Any]] = {3: _stop_iteration_error, 6: tuple}
TWO: dict[int, Callable[[Any, Any], Any]] = {}


@handles("CALL_INTRINSIC_1", "CALL_INTRINSIC_2")
def call_intrinsic(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    count = int(instruction.opname[-1])
    if count == 1 and instruction.arg in _OTHERS:
        return _OTHERS[instruction.arg](interpreter, frame, instruction)
    table: dict[int, Callable[..., Any]] = ONE if count == 1 else TWO
    if instruction.arg not in table:
        raise Break(f"the intrinsic function {instruction.arg} is not known")
    frame.stack.append(table[instruction.arg](*pop_many(frame, count)))
    return None
