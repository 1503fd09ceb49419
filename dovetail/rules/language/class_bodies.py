"""Names in the body of a class, and how such a body is started."""

from __future__ import annotations

import builtins
from typing import Any

from dovetail.frontend.code.frame import Frame, Instruction
from dovetail.frontend.instructions.shared import TABLE, Handler, handles
from dovetail.frontend.protocol import FrameRunner


def _found(interpreter: FrameRunner, namespace: Any, name: str) -> tuple[bool, Any]:
    if type(namespace) is dict:
        return name in namespace, namespace.get(name)
    try:
        return True, interpreter.load_item(namespace, name)
    except KeyError:
        return False, None


def _load(is_cell: bool, is_pushed: bool = False) -> Handler:
    """A name of the class body, or else a cell or global; ``is_pushed``: the namespace is on the stack."""

    def handler(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
        name = instruction.argval
        found, value = _found(interpreter, frame.stack.pop() if is_pushed else frame.namespace, name)
        if not found:
            value = interpreter.load_cell(frame, name) if is_cell else interpreter.load_global(frame, name)
        frame.stack.append(value)

    return handler


TABLE |= {
    "LOAD_BUILD_CLASS": lambda interpreter, frame, item: frame.stack.append(builtins.__build_class__),
    "LOAD_LOCALS": lambda interpreter, frame, item: frame.stack.append(frame.namespace),
    "LOAD_NAME": _load(is_cell=False),
    "LOAD_CLASSDEREF": _load(is_cell=True),
    "LOAD_FROM_DICT_OR_DEREF": _load(is_cell=True, is_pushed=True),
    "LOAD_FROM_DICT_OR_GLOBALS": _load(is_cell=False, is_pushed=True),
}


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
