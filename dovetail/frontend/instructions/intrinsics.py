"""``CALL_INTRINSIC_1`` and ``CALL_INTRINSIC_2`` (3.12 on): operations that were an instruction each before."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from dovetail.frontend.code.frame import Break, Frame, Instruction
from dovetail.frontend.instructions.operations import unary
from dovetail.frontend.instructions.refusals import refuse_async, refuse_module_code
from dovetail.frontend.instructions.shared import Handler, handles, pop_many
from dovetail.frontend.protocol import FrameRunner


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
