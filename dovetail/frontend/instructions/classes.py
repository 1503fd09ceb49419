"""Names in the body of a class, and how such a body is started."""

from __future__ import annotations

import builtins
from typing import Any

from dovetail.frontend.code.frame import Frame, Instruction
from dovetail.frontend.instructions.shared import handles
from dovetail.frontend.protocol import FrameRunner


def _found(interpreter: FrameRunner, namespace: Any, name: str) -> tuple[bool, Any]:
    if type(namespace) is dict:
        return name in namespace, namespace.get(name)
    try:
        return True, interpreter.load_item(namespace, name)
    except KeyError:
        return False, None


@handles("LOAD_BUILD_CLASS")
def load_build_class(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(builtins.__build_class__)


@handles("LOAD_NAME")
def load_name(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    found, value = _found(interpreter, frame.namespace, instruction.argval)
    frame.stack.append(value if found else interpreter.load_global(frame, instruction.argval))


@handles("STORE_NAME")
def store_name(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = frame.stack.pop()
    if type(frame.namespace) is dict:
        frame.namespace[instruction.argval] = value
    else:
        interpreter.store_item(frame.namespace, instruction.argval, value)


@handles("DELETE_NAME")
def delete_name(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    try:
        if type(frame.namespace) is dict:
            del frame.namespace[instruction.argval]
        else:
            interpreter.delete_item(frame.namespace, instruction.argval)
    except KeyError:
        raise NameError(f"name {instruction.argval!r} is not defined") from None


@handles("SETUP_ANNOTATIONS")
def setup_annotations(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    found, _ = _found(interpreter, frame.namespace, "__annotations__")
    if not found:
        interpreter.store_item(frame.namespace, "__annotations__", {})


@handles("LOAD_LOCALS")
def load_locals(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(frame.namespace)


@handles("LOAD_CLASSDEREF")
def load_classderef(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    found, value = _found(interpreter, frame.namespace, instruction.argval)
    frame.stack.append(value if found else interpreter.load_cell(frame, instruction.argval))


@handles("LOAD_FROM_DICT_OR_DEREF")
def load_from_dict_or_deref(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    found, value = _found(interpreter, frame.stack.pop(), instruction.argval)
    frame.stack.append(value if found else interpreter.load_cell(frame, instruction.argval))


@handles("LOAD_FROM_DICT_OR_GLOBALS")
def load_from_dict_or_globals(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    found, value = _found(interpreter, frame.stack.pop(), instruction.argval)
    frame.stack.append(value if found else interpreter.load_global(frame, instruction.argval))
