"""The instruction set of Python 3.11: the shared semantics plus what this version encodes in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.frontend.frame import NULL
from dovetail.frontend.instructions import shared
from dovetail.frontend.instructions.shared import pop_many

TABLE: dict[str, Callable[[Any, Any, Any], Any]] = dict(shared.TABLE)


def _target(frame: Any, instruction: Any) -> int:
    return int(frame.decoded.index_of[instruction.argval])


def _load_global(interpreter: Any, frame: Any, instruction: Any) -> None:
    if instruction.arg & 1:
        frame.stack.append(NULL)
    frame.stack.append(interpreter.load_global(frame, instruction.argval))


def _load_attr(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(interpreter.load_attribute(frame.stack.pop(), instruction.argval))


def _load_method(interpreter: Any, frame: Any, instruction: Any) -> None:
    method = interpreter.load_attribute(frame.stack.pop(), instruction.argval)
    frame.stack.append(NULL)
    frame.stack.append(method)


def _keyword_names(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.keyword_names = frame.code.co_consts[instruction.arg]


def _call(interpreter: Any, frame: Any, instruction: Any) -> None:
    names = frame.keyword_names
    frame.keyword_names = ()
    values = pop_many(frame, instruction.arg)
    second = frame.stack.pop()
    first = frame.stack.pop()
    if first is NULL:
        function = second
    else:
        function = first
        values.insert(0, second)
    count = len(values) - len(names)
    keywords = dict(zip(names, values[count:], strict=True))
    frame.stack.append(interpreter.call(function, tuple(values[:count]), keywords, direct=True))


def _make_function(interpreter: Any, frame: Any, instruction: Any) -> None:
    code = frame.stack.pop()
    closure = frame.stack.pop() if instruction.arg & 8 else None
    annotations = frame.stack.pop() if instruction.arg & 4 else None
    kwdefaults = frame.stack.pop() if instruction.arg & 2 else None
    defaults = frame.stack.pop() if instruction.arg & 1 else None
    frame.stack.append(shared.make_function(interpreter, frame, code, closure, annotations, kwdefaults, defaults))


def _for_iter(interpreter: Any, frame: Any, instruction: Any) -> int | None:
    done, value = interpreter.advance(frame.stack[-1])
    if done:
        frame.stack.pop()
        return _target(frame, instruction)
    frame.stack.append(value)
    return None


def _send(interpreter: Any, frame: Any, instruction: Any) -> int | None:
    value = frame.stack.pop()
    done, result = interpreter.send(frame.stack[-1], value)
    if done:
        frame.stack.pop()
        frame.stack.append(result)
        return _target(frame, instruction)
    frame.stack.append(result)
    return None


def _jump(interpreter: Any, frame: Any, instruction: Any) -> int:
    return _target(frame, instruction)


def _jump_if(wanted: bool) -> Callable[[Any, Any, Any], int | None]:
    def handler(interpreter: Any, frame: Any, instruction: Any) -> int | None:
        return _target(frame, instruction) if interpreter.truth(frame.stack.pop()) is wanted else None

    return handler


def _jump_if_none(wanted: bool) -> Callable[[Any, Any, Any], int | None]:
    def handler(interpreter: Any, frame: Any, instruction: Any) -> int | None:
        return _target(frame, instruction) if (frame.stack.pop() is None) is wanted else None

    return handler


def _jump_or_pop(wanted: bool) -> Callable[[Any, Any, Any], int | None]:
    def handler(interpreter: Any, frame: Any, instruction: Any) -> int | None:
        if interpreter.truth(frame.stack[-1]) is wanted:
            return _target(frame, instruction)
        frame.stack.pop()
        return None

    return handler


TABLE.update(
    {
        "LOAD_GLOBAL": _load_global,
        "LOAD_ATTR": _load_attr,
        "LOAD_METHOD": _load_method,
        "KW_NAMES": _keyword_names,
        "CALL": _call,
        "MAKE_FUNCTION": _make_function,
        "FOR_ITER": _for_iter,
        "SEND": _send,
        "JUMP_FORWARD": _jump,
        "JUMP_BACKWARD": _jump,
        "JUMP_BACKWARD_NO_INTERRUPT": _jump,
        "JUMP_IF_TRUE_OR_POP": _jump_or_pop(True),
        "JUMP_IF_FALSE_OR_POP": _jump_or_pop(False),
    }
)
for _direction in ("FORWARD", "BACKWARD"):
    TABLE[f"POP_JUMP_{_direction}_IF_TRUE"] = _jump_if(True)
    TABLE[f"POP_JUMP_{_direction}_IF_FALSE"] = _jump_if(False)
    TABLE[f"POP_JUMP_{_direction}_IF_NONE"] = _jump_if_none(True)
    TABLE[f"POP_JUMP_{_direction}_IF_NOT_NONE"] = _jump_if_none(False)
