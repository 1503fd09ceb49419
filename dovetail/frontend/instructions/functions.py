"""Functions, calls, imports, and intrinsic functions."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

from dovetail.frontend.code.frame import Frame, Instruction
from dovetail.frontend.instructions.shared import handles
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


def _stop_iteration_error(error: BaseException) -> BaseException:
    """The error that leaves a generator in the place of a StopIteration."""
    if not isinstance(error, StopIteration):
        return error
    raised = RuntimeError("generator raised StopIteration")
    raised.__cause__ = raised.__context__ = error
    return raised


#: Intrinsic functions (3.12 on) of one value, by number.
_INTRINSICS: dict[int, Callable[[FrameRunner, Any], Any]] = {
    3: lambda interpreter, value: _stop_iteration_error(value),
    5: lambda interpreter, value: interpreter.operate(operator.pos, value),
    6: lambda interpreter, value: tuple(value),
}


@handles("CALL_INTRINSIC_1")
def call_intrinsic(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(_INTRINSICS[instruction.arg](interpreter, frame.stack.pop()))


def is_known(instruction: Instruction) -> bool:
    """Whether the instruction calls an intrinsic function that frames may have, or none."""
    return instruction.opname != "CALL_INTRINSIC_1" or instruction.arg in _INTRINSICS
