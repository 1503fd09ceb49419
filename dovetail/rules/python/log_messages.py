"""Log messages that contain a size: ``logger.warning(f"padded from {length}")``.

Formatting a symbolic size would specialise it: a graph for each length, for the sake of a message. A message is given once, while
the function is captured, with the numbers of that call. So a text that is only used in a message needs no guard; the instructions
that follow say whether it is.
"""

from __future__ import annotations

import dis
import functools
import logging
import types
import warnings
from typing import Any

from dovetail.frontend.code.frame import NULL, Frame
from dovetail.frontend.interpreter.shown_frames import call_later
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import format_rule, rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.torch_private import sizes as private_sizes

_LEVELS = ("debug", "info", "warning", "warn", "error", "critical", "exception")
_LOGGING = frozenset(getattr(logging.Logger, name) for name in _LEVELS if hasattr(logging.Logger, name))
_CALLS = ("CALL", "CALL_KW")
# How many values each instruction that may come before the call takes off the stack.
_TAKES = {
    **dict.fromkeys(("LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST_LOAD_FAST", "PUSH_NULL"), 0),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "UNARY_NEGATIVE", "FORMAT_SIMPLE", "CONVERT_VALUE"), 1),
    **dict.fromkeys(("BINARY_OP", "BINARY_SUBSCR", "FORMAT_WITH_SPEC"), 2),
}


def gives_message(function: Any) -> bool:
    """Whether a function only gives its arguments as a message: ``warnings.warn``, a logger's methods, and functions that hand
    their arguments on to these.

    >>> gives_message(warnings.warn), gives_message(logging.getLogger("x").info), gives_message(print)
    (True, True, False)
    """
    if function is warnings.warn:
        return True
    if type(function) is not types.MethodType or not isinstance(function.__self__, logging.Logger):
        return False
    inner = function.__func__
    # One that gives each message once, as libraries have it.
    inner = inner.__wrapped__ if isinstance(inner, functools._lru_cache_wrapper) else inner
    if type(inner) is not types.FunctionType:
        return False
    return inner in _LOGGING or _hands_on(inner.__code__)


def _hands_on(code: types.CodeType) -> bool:
    """Whether code is one call of a logger's method and nothing else: no branch, and no other name."""
    names = [item.opname for item in dis.get_instructions(code)]
    calls = sum(name in (*_CALLS, "CALL_FUNCTION_EX") for name in names)
    is_plain = not code.co_freevars and not any("JUMP" in name or "STORE" in name for name in names)
    return calls == 1 and is_plain and set(code.co_names) <= set(_LEVELS)


def is_only_in_message(frame: Frame, pushed: int) -> bool:
    """Whether the text that the present instruction leaves on the stack is for a message alone: the argument, by itself or as a
    part of a longer text, of a call that gives one, and whose own result is not used. ``pushed`` is how high the stack is then.
    """
    instructions = frame.decoded.instructions
    depth = place = pushed
    for position in range(frame.position + 1, len(instructions) - 1):
        item = instructions[position]
        name, argument = item.opname, item.arg
        if name in ("PRECALL", "KW_NAMES"):
            continue
        if name in _CALLS:
            # The function and the NULL beside it, the arguments, and the names of those by keyword.
            below = depth - argument - (3 if name == "CALL_KW" else 2)
            if below < place:
                callee = [value for value in frame.stack[below : below + 2] if value is not NULL]
                is_argument = below + 2 < place and len(callee) == 1
                return is_argument and gives_message(callee[0]) and instructions[position + 1].opname == "POP_TOP"
            depth = below + 1
        elif name == "BUILD_STRING":
            depth -= argument - 1
            # The longer text is what is followed from here on.
            place = min(place, depth)
        else:
            takes = 1 + bool(argument & 4) if name == "FORMAT_VALUE" else _TAKES.get(name)
            if takes is None or item.is_jump_target or depth - takes < place:
                return False
            depth += dis.stack_effect(item.opcode, argument if item.opcode >= dis.HAVE_ARGUMENT else None)
    return False


@format_rule
def _number_of_a_message(interpreter: TracingInterpreter, frame: Frame, value: Any) -> Any:
    """A symbolic number as it is in this call, where the text is for a message alone."""
    number = _as_it_is(value)
    return number if number is not value and is_only_in_message(frame, len(frame.stack) + 1) else NotImplemented


def _as_it_is(value: Any) -> Any:
    is_known = private_sizes.is_symbolic(value) and not private_sizes.is_data_number(value)
    return value.node.hint if is_known else value


def _message(function: Any) -> Any:
    def handler(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(map(_as_it_is, args))
        given = (*args[1:], *kwargs.values())
        if not isinstance(args[0], logging.Logger) or not all(map(is_leaf_value, given)):
            return interpreter.call_torch(function, args, kwargs)
        # Once the capture has succeeded: one that ends at a graph break is made anew, and eager gives its messages itself.
        interpreter.messages.append(call_later(interpreter, function, *args, **kwargs))
        return None

    return handler


for _function in _LOGGING:
    rule(_function)(_message(_function))
