"""Jumps and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.frontend.instructions.shared import handles


def target_of(frame: Any, instruction: Any) -> int:
    """The index of the instruction that a jump goes to."""
    return int(frame.decoded.index_of[instruction.argval])


@handles("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
def jump(interpreter: Any, frame: Any, instruction: Any) -> int:
    return target_of(frame, instruction)


def jump_if(wanted: bool) -> Callable[[Any, Any, Any], int | None]:
    """A jump where the value's truth is ``wanted``."""

    def handler(interpreter: Any, frame: Any, instruction: Any) -> int | None:
        target = target_of(frame, instruction)
        return target if interpreter.truth_at_jump(frame, frame.stack.pop(), target, wanted) is wanted else None

    return handler


def jump_if_none(wanted: bool) -> Callable[[Any, Any, Any], int | None]:
    """A jump where ``value is None`` is ``wanted``."""

    def handler(interpreter: Any, frame: Any, instruction: Any) -> int | None:
        return target_of(frame, instruction) if (frame.stack.pop() is None) is wanted else None

    return handler


def for_iter(skip: int) -> Callable[[Any, Any, Any], int | None]:
    """One step of a loop; at its end on to the target, over ``skip`` instructions that would clean up the stack."""

    def handler(interpreter: Any, frame: Any, instruction: Any) -> int | None:
        done, value = interpreter.advance(frame.stack[-1])
        if done:
            frame.stack.pop()
            return target_of(frame, instruction) + skip
        frame.stack.append(value)
        return None

    return handler
