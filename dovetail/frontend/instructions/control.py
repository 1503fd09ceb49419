"""Jumps, loops and generators."""

from __future__ import annotations

from dovetail.frontend.code.frame import Frame, Instruction, Return, Yield
from dovetail.frontend.instructions.shared import TABLE, Handler, handles, pushes
from dovetail.frontend.protocol import FrameRunner


def target_of(frame: Frame, instruction: Instruction) -> int:
    """The index of the instruction that a jump goes to."""
    return int(frame.decoded.index_of[instruction.argval])


@handles("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
def jump(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> int:
    return target_of(frame, instruction)


def jump_if(wanted: bool) -> Handler:
    """A jump where the value's truth is ``wanted``."""

    def handler(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> int | None:
        target = target_of(frame, instruction)
        return target if interpreter.truth_at_jump(frame, frame.stack.pop(), target, wanted) is wanted else None

    return handler


def jump_if_none(wanted: bool) -> Handler:
    """A jump where ``value is None`` is ``wanted``."""

    def handler(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> int | None:
        return target_of(frame, instruction) if (frame.stack.pop() is None) is wanted else None

    return handler


def for_iter(skip: int) -> Handler:
    """One step of a loop; at its end on to the target, over ``skip`` instructions that would clean up the stack."""

    def handler(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> int | None:
        done, value = interpreter.advance(frame.stack[-1])
        if done:
            frame.stack.pop()
            return target_of(frame, instruction) + skip
        frame.stack.append(value)
        return None

    return handler


TABLE |= {
    "GET_ITER": pushes(lambda interpreter, frame, item: interpreter.iterate(frame.stack.pop())),
    "GET_YIELD_FROM_ITER": pushes(lambda interpreter, frame, item: interpreter.iterate(frame.stack.pop())),
    "YIELD_VALUE": lambda interpreter, frame, item: Yield(frame.stack.pop()),
    "RETURN_VALUE": lambda interpreter, frame, item: Return(frame.stack.pop()),
    "RETURN_GENERATOR": lambda interpreter, frame, item: Return(interpreter.make_generator(frame)),
}
