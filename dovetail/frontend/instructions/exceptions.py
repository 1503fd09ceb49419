"""Exceptions: raising, handlers, ``with`` blocks."""

from __future__ import annotations

from typing import Any

from dovetail.frontend.code.frame import NULL, Frame, Instruction
from dovetail.frontend.instructions.shared import TABLE, handles
from dovetail.frontend.protocol import FrameRunner


def _raised_again(frame: Frame, error: BaseException) -> None:
    """Raise an exception as it is; :meth:`Frame.enter_handler` finds its traceback on the stack."""
    frame.stack.append(error.__traceback__)
    raise error


def _instance(interpreter: FrameRunner, kind: type, where: str) -> BaseException:
    made = interpreter.call(kind, (), {})
    if not isinstance(made, BaseException):
        raise TypeError(
            f"calling {kind!r} should have returned an instance of BaseException, not {type(made)!r}"
            if where == "raise"
            else "exception causes must derive from BaseException"
        )
    return made


TABLE["LOAD_ASSERTION_ERROR"] = lambda interpreter, frame, item: frame.stack.append(AssertionError)


@handles("RAISE_VARARGS")
def raise_varargs(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    handled = interpreter.handled_exception()
    if instruction.arg == 0:
        if handled is None:
            raise RuntimeError("No active exception to reraise")
        _raised_again(frame, handled)
    cause = frame.stack.pop() if instruction.arg == 2 else NULL
    error = frame.stack.pop()
    if isinstance(error, type) and issubclass(error, BaseException):
        error = _instance(interpreter, error, "raise")
    if not isinstance(error, BaseException):
        raise TypeError("exceptions must derive from BaseException")
    if cause is not NULL:
        if isinstance(cause, type) and issubclass(cause, BaseException):
            cause = _instance(interpreter, cause, "cause")
        if cause is not None and not isinstance(cause, BaseException):
            raise TypeError("exception causes must derive from BaseException")
        error.__cause__ = cause
    _set_context(error, handled)
    raise error


def _set_context(error: BaseException, handled: BaseException | None) -> None:
    """Make the handled exception the context of the raised one; a cycle is cut as Python cuts it."""
    if handled is None or handled is error:
        return
    seen: set[int] = set()
    step = handled
    while id(step) not in seen and step.__context__ is not None:
        seen.add(id(step))
        if step.__context__ is error:
            step.__context__ = None
            break
        step = step.__context__
    error.__context__ = handled


@handles("PUSH_EXC_INFO")
def push_exc_info(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    error = frame.stack.pop()
    frame.stack.append(frame.current_exceptions[-1] if frame.current_exceptions else None)
    frame.current_exceptions.append(error)
    frame.stack.append(error)


@handles("CHECK_EXC_MATCH")
def check_exc_match(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    kinds = frame.stack.pop()
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    # As Python does it: by the real class, whatever __instancecheck__ says.
    frame.stack.append(issubclass(type(frame.stack[-1]), kinds))


@handles("POP_EXCEPT")
def pop_except(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.pop()
    if frame.current_exceptions:
        frame.current_exceptions.pop()


@handles("RERAISE")
def reraise(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    _raised_again(frame, frame.stack.pop())


# --- with -------------------------------------------------------------------------------------------------------------


def special_method(manager: Any, name: str) -> Any:
    """A special method, looked up on the class."""
    for owner in type(manager).__mro__:
        if name in owner.__dict__:
            found = owner.__dict__[name]
            bind = getattr(type(found), "__get__", None)
            return found if bind is None else bind(found, manager, type(manager))
    missed = " (missed __exit__ method)" if name == "__exit__" else ""
    raise TypeError(f"{type(manager).__name__!r} object does not support the context manager protocol{missed}")


@handles("BEFORE_WITH")
def before_with(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    manager = frame.stack.pop()
    enter = special_method(manager, "__enter__")
    leave = special_method(manager, "__exit__")
    frame.stack.append(leave)
    frame.stack.append(interpreter.call(enter, (), {}))


@handles("WITH_EXCEPT_START")
def with_except_start(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    error = frame.stack[-1]
    leave = frame.stack[-4]
    frame.stack.append(interpreter.call(leave, (type(error), error, error.__traceback__), {}))
