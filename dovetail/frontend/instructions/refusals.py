"""Instructions that no captured function has: those of async code, and those of a module's own level."""

from __future__ import annotations

from dovetail.frontend.code.frame import Break, Frame, Instruction
from dovetail.frontend.instructions.shared import handles
from dovetail.frontend.protocol import FrameRunner


@handles("ASYNC_GEN_WRAP", "BEFORE_ASYNC_WITH", "END_ASYNC_FOR", "GET_AITER", "GET_ANEXT", "GET_AWAITABLE")
def refuse_async(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    raise Break(f"{frame.code.co_qualname} is async ({instruction.opname})", "keep async code outside of the function")


@handles("IMPORT_STAR", "PRINT_EXPR")
def refuse_module_code(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    raise Break(f"{instruction.opname} belongs to the code of a module", "call a function")


@handles("ENTER_EXECUTOR", "EXIT_INIT_CHECK", "INTERPRETER_EXIT", "RESERVED")
def refuse_internal(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    raise Break(f"{instruction.opname} is put into code by Python's own interpreter only", "call a function")
