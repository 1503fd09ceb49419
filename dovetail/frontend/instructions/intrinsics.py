"""``CALL_INTRINSIC_1`` and ``CALL_INTRINSIC_2`` (3.12 on): what was an instruction each before, and type parameters."""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable
from typing import Any

from dovetail.frontend.code.frame import Break, Frame, Instruction
from dovetail.frontend.instructions.exceptions import exception_to_raise
from dovetail.frontend.instructions.operations import unary
from dovetail.frontend.instructions.refusals import refuse_async, refuse_module_code
from dovetail.frontend.instructions.shared import handles
from dovetail.frontend.protocol import FrameRunner


def _type_parameter(parameter: str, name: str, compute: Any = None) -> Any:
    """A type parameter as Python's own syntax makes it: its bound is computed when somebody asks for it."""
    namespace: dict[str, Any] = {"compute": compute}
    exec(f"def generic[{parameter.format(name)}](): ...", namespace)
    return namespace["generic"].__type_params__[0]


def _type_alias(parts: tuple[str, Any, Any]) -> Any:
    name, parameters, compute = parts
    if parameters:
        # Python has no way to hand a parameter to an alias whose value is computed later.
        return typing.TypeAliasType(name, compute(), type_params=parameters)  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {"compute": compute}
    exec(f"type {name} = compute()", namespace)
    return namespace[name]


def _stop_iteration_error(error: BaseException) -> BaseException:
    """What leaves a generator in the place of a StopIteration."""
    if not isinstance(error, StopIteration):
        return error
    raised = RuntimeError("generator raised StopIteration")
    raised.__cause__ = raised.__context__ = error
    return raised


def _set_type_parameters(function: Any, parameters: Any) -> Any:
    function.__type_params__ = parameters
    return function


def _with_default(parameter: Any, compute: Any) -> Any:
    kind = type(parameter).__name__
    stars = {"TypeVar": "", "ParamSpec": "**", "TypeVarTuple": "*"}[kind]
    if kind == "TypeVar" and (parameter.__bound__ is not None or parameter.__constraints__):
        return typing.TypeVar(  # type: ignore[misc, call-arg]
            parameter.__name__,
            *parameter.__constraints__,
            bound=parameter.__bound__,
            infer_variance=True,
            default=compute(),
        )
    default = "*compute()" if kind == "TypeVarTuple" else "compute()"
    return _type_parameter(f"{stars}{{}} = {default}", parameter.__name__, compute)


_positive = unary(operator.pos)
ONE: dict[int, Callable[[Any], Any]] = {
    3: _stop_iteration_error,
    6: tuple,
    7: lambda name: _type_parameter("{}", name),
    8: lambda name: _type_parameter("**{}", name),
    9: lambda name: _type_parameter("*{}", name),
    10: lambda parameters: typing.Generic[  # type: ignore[index]
        tuple(typing.Unpack[item] if isinstance(item, typing.TypeVarTuple) else item for item in parameters)
    ],
    11: _type_alias,
}
TWO: dict[int, Callable[[Any, Any], Any]] = {
    1: exception_to_raise,
    2: lambda name, compute: _type_parameter("{}: compute()", name, compute),
    3: lambda name, compute: _type_parameter("{}: (*compute(),)", name, compute),
    4: _set_type_parameters,
    5: _with_default,
}


@handles("CALL_INTRINSIC_1")
def call_intrinsic_1(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
    number = instruction.arg
    if number in (1, 2):
        return refuse_module_code(interpreter, frame, instruction)
    if number == 4:
        return refuse_async(interpreter, frame, instruction)
    if number == 5:
        return _positive(interpreter, frame, instruction)
    if number not in ONE:
        raise Break(f"the intrinsic function {number} is not known")
    frame.stack.append(ONE[number](frame.stack.pop()))
    return None


@handles("CALL_INTRINSIC_2")
def call_intrinsic_2(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    if instruction.arg not in TWO:
        raise Break(f"the intrinsic function {instruction.arg} is not known")
    second = frame.stack.pop()
    frame.stack.append(TWO[instruction.arg](frame.stack.pop(), second))
