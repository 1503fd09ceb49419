"""The table of instructions that mean the same in every supported version; instructions that move and name values.

A handler gets the runner of the frame, the frame and the instruction. It returns None to go on with the next instruction, the
index of another one to jump, or :class:`Return` or :class:`Yield`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from dovetail.frontend.code.frame import NULL, Frame, Instruction, Return, Unread, Yield
from dovetail.frontend.protocol import FrameRunner

Handler = Callable[[FrameRunner, Frame, Instruction], int | Return | Yield | None]

TABLE: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler under opcode names that mean the same in every supported version."""

    def register(handler: Handler) -> Handler:
        TABLE.update(dict.fromkeys(names, handler))
        return handler

    return register


def pushes(compute: Callable[[FrameRunner, Frame, Instruction], Any]) -> Handler:
    """A handler that pushes a value."""

    def handler(interpreter: FrameRunner, frame: Frame, item: Instruction) -> None:
        frame.stack.append(compute(interpreter, frame, item))

    return handler


def pop_many(frame: Frame, count: int) -> list[Any]:
    """Pop ``count`` values, the deepest first."""
    if count == 0:
        return []
    values = frame.stack[-count:]
    del frame.stack[-count:]
    return values


def unary(function: Callable[[Any], Any]) -> Handler:
    """A handler of an operator with one operand."""
    return pushes(lambda interpreter, frame, item: interpreter.operate(function, frame.stack.pop()))


# --- the stack --------------------------------------------------------------------------------------------------------


@handles("NOP", "RESUME", "CACHE", "COPY_FREE_VARS")
def no_operation(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """Set-up that :class:`Frame` has done already."""


@handles("POP_TOP")
def pop_top(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.pop()


@handles("SWAP")
def swap(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    stack = frame.stack
    stack[-1], stack[-instruction.arg] = stack[-instruction.arg], stack[-1]


TABLE["LOAD_CONST"] = lambda interpreter, frame, item: frame.stack.append(item.argval)
TABLE["PUSH_NULL"] = lambda interpreter, frame, item: frame.stack.append(NULL)
TABLE["COPY"] = lambda interpreter, frame, item: frame.stack.append(frame.stack[-item.arg])


# --- names ------------------------------------------------------------------------------------------------------------


def unbound_variable(code: types.CodeType, name: str) -> NameError:
    """The error of a variable that has no value."""
    if name in code.co_freevars:
        return NameError(
            f"cannot access free variable {name!r} where it is not associated with a value in enclosing scope"
        )
    return UnboundLocalError(f"cannot access local variable {name!r} where it is not associated with a value")


def read_variable(interpreter: FrameRunner, frame: Frame, name: str) -> Any:
    """A local variable; from 3.12 on also the cell that stands in its place, which closures are made of."""
    value = frame.locals.get(name, NULL)
    if value is NULL:
        cell = frame.cells.get(name)
        if cell is None:
            raise unbound_variable(frame.code, name)
        return cell
    if type(value) is Unread:
        value = frame.locals[name] = interpreter.first_read(value)
    return value


def super_arguments(interpreter: FrameRunner, frame: Frame) -> tuple[type, Any]:
    """The class and the object that ``super()`` finds in the frame of a method."""
    if not frame.code.co_argcount:
        raise RuntimeError("super(): no arguments")
    if "__class__" not in frame.cells:
        raise RuntimeError("super(): __class__ cell not found")
    first = read_variable(interpreter, frame, frame.code.co_varnames[0])
    instance = first.cell_contents if isinstance(first, types.CellType) else first
    return frame.cells["__class__"].cell_contents, instance


def write_variable(frame: Frame, name: str, value: Any) -> None:
    """Write a local variable, or give a cell or "unbound" (NULL) back that an inlined comprehension had put aside."""
    if name not in frame.decoded.shared_names:
        if value is NULL:
            frame.locals.pop(name, None)
        else:
            frame.locals[name] = value
        return
    frame.locals.pop(name, None)
    frame.cells.pop(name, None)
    if isinstance(value, types.CellType):
        frame.cells[name] = value
    elif value is not NULL:
        frame.locals[name] = value


@handles("DELETE_FAST")
def delete_fast(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    name = instruction.argval
    if name not in frame.locals:
        raise unbound_variable(frame.code, name)
    del frame.locals[name]


@handles("MAKE_CELL")
def make_cell(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """A cell for a variable of an inlined comprehension; those at a function's start :class:`Frame` has made."""
    frame.cells.setdefault(instruction.argval, types.CellType())


TABLE |= dict.fromkeys(
    ("LOAD_FAST", "LOAD_FAST_CHECK"),
    lambda interpreter, frame, item: frame.stack.append(read_variable(interpreter, frame, item.argval)),
)
TABLE |= {
    "STORE_FAST": lambda interpreter, frame, item: write_variable(frame, item.argval, frame.stack.pop()),
    "LOAD_CLOSURE": lambda interpreter, frame, item: frame.stack.append(frame.cells[item.argval]),
    "LOAD_DEREF": pushes(lambda interpreter, frame, item: interpreter.load_cell(frame, item.argval)),
    "STORE_DEREF": lambda interpreter, frame, item: interpreter.store_cell(frame, item.argval, frame.stack.pop()),
    "DELETE_DEREF": lambda interpreter, frame, item: interpreter.delete_cell(frame, item.argval),
    "STORE_GLOBAL": lambda interpreter, frame, item: interpreter.store_global(frame, item.argval, frame.stack.pop()),
    "DELETE_GLOBAL": lambda interpreter, frame, item: interpreter.delete_global(frame, item.argval),
}
