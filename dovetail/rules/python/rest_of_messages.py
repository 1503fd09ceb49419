"""After a graph break in the arguments of a message, the rest of its call runs for real: ``print(f"{step}: {loss.item():.3f}")``.

So does a message that is given just behind a graph break, and ``print`` from the first number of the graph that it shows. The texts
and numbers in it are other ones at every call; as arguments of the code that goes on they would be guarded, and each call would
compile that code anew.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import logging
import types
import warnings
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.code.frame import Break, Frame, Instruction
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import format_rule, real_rule
from dovetail.guards.reading import instance_dict
from dovetail.rules.python.log_messages import LEVELS, METHODS

#: Calls in an argument that read a number or write a text; any other may be worth a graph.
_READING_METHODS = frozenset({"item", "tolist", "numel", "size", "dim", "format", "join"})
_READING_FUNCTIONS = (str, repr, len, float, int, round)
_CALLS = ("CALL", "CALL_KW")
_BUILDING = ("BUILD_STRING", "BUILD_TUPLE", "BUILD_LIST")
# How many values each instruction that may come before the call takes off the stack.
_TAKES = {
    **dict.fromkeys(("LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST_LOAD_FAST", "PUSH_NULL"), 0),
    **dict.fromkeys(("LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_SMALL_INT"), 0),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "UNARY_NEGATIVE", "FORMAT_SIMPLE", "CONVERT_VALUE"), 1),
    **dict.fromkeys(("BINARY_OP", "BINARY_SUBSCR", "FORMAT_WITH_SPEC"), 2),
}


@dataclass(frozen=True)
class _Method:
    """The name of an attribute of an unknown object."""

    name: str


@functools.lru_cache(maxsize=4096)
def _silent(code: types.CodeType) -> set[int]:
    """The instructions from which no message was ahead. Where a name has come to mean ``print``, there is one more graph break."""
    return set()


@real_rule
def _rest_of_a_message(frame: Frame) -> int:
    silent = _silent(frame.code)
    if frame.position in silent:
        return 0
    end, _ = _message_ahead(frame, frame.position, list(frame.stack))
    if not end:
        silent.add(frame.position)
        return 0
    return end - frame.position


def _for_print(interpreter: TracingInterpreter, frame: Frame, value: Any, specification: str) -> Any:
    _, function = _message_ahead(frame, frame.position + 1, [*frame.stack, None])
    if function is print:
        raise Break("print writes to the terminal", "use logging")
    return NotImplemented


# Before the rule that makes a text of the number.
format_rule.insert(0, _for_print)


def _message_ahead(frame: Frame, start: int, stack: list[Any]) -> tuple[int, Any]:
    """The end of a call that gives a message, and the function that is called; 0 and None where none is ahead."""
    instructions = frame.decoded.instructions
    for position in range(start, len(instructions)):
        item = instructions[position]
        if item.opname in ("PRECALL", "KW_NAMES"):
            continue
        if item.is_jump_target and position > start:
            return 0, None
        if item.opname in _CALLS:
            place = _callee_place(item, len(stack))
            callee = stack[max(place, 0) : max(place + 2, 0)]
            for value in callee:
                if value is print or gives_message(value):
                    return position + 1, value
            if not any(map(_is_reading, callee)):
                return 0, None
            stack[place:] = [None]
            continue
        taken = item.arg if item.opname in _BUILDING else _values_taken(item)
        if taken is None or taken > len(stack):
            return 0, None
        # An instruction that loads a function may leave a second place beside it.
        count = taken + effect_on_stack(item)
        stack[len(stack) - taken :] = [_loaded(frame, item, stack[-1] if taken else None)] * count
    return 0, None


def _is_reading(value: Any) -> bool:
    return (
        value.name in _READING_METHODS
        if isinstance(value, _Method)
        else any(value is item for item in _READING_FUNCTIONS)
    )


def _loaded(frame: Frame, item: Instruction, owner: Any) -> Any:
    """The value that an instruction loads, as far as it is known without running code of the program."""
    name = item.argval
    if item.opname == "LOAD_GLOBAL":
        return frame.globals.get(name, getattr(builtins, name, None))
    if item.opname in ("LOAD_FAST", "LOAD_FAST_BORROW"):
        return frame.locals.get(name)
    if item.opname == "LOAD_DEREF":
        return frame.cells[name].cell_contents if is_bound(frame.cells[name]) else None
    if item.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
        return None
    own: Any = None
    with contextlib.suppress(AttributeError):
        own = instance_dict(owner)
    function = getattr(type(owner), name, None) if isinstance(owner, logging.Logger) else None
    inherited = types.MethodType(function, owner) if isinstance(function, types.FunctionType) else _Method(name)
    # A class may say that its objects have something else for a dictionary.
    return own.get(name, inherited) if isinstance(own, (dict, types.MappingProxyType)) else inherited


# --- calls that give messages -----------------------------------------------------------------------------------------


def gives_message(function: Any) -> bool:
    """Whether a function only gives its arguments as a message: ``warnings.warn``, a logger's methods, and methods of loggers
    that hand their arguments on to these.

    >>> gives_message(warnings.warn), gives_message(logging.getLogger("x").info), gives_message(print)
    (True, True, False)
    """
    if function is warnings.warn:
        return True
    if type(function) is not types.MethodType or not isinstance(function.__self__, logging.Logger):
        return False
    inner = function.__func__
    return type(inner) is types.FunctionType and (inner in METHODS or _hands_on(inner.__code__))


def _hands_on(code: types.CodeType) -> bool:
    """Whether code is one call of a logger's method and nothing else: no branch, and no other name."""
    names = [item.opname for item in dis.get_instructions(code)]
    calls = sum(name in (*_CALLS, "CALL_FUNCTION_EX") for name in names)
    is_plain = not code.co_freevars and not any("JUMP" in name or "STORE" in name for name in names)
    return calls == 1 and is_plain and set(code.co_names) <= set(LEVELS)


def _callee_place(call: Instruction, depth: int) -> int:
    """Where on a stack of ``depth`` the function and the NULL beside it are: below the arguments and their names."""
    return depth - call.arg - (3 if call.opname == "CALL_KW" else 2)


def _values_taken(item: Instruction) -> int | None:
    """How many values an instruction that is no call takes off the stack; None where nothing is known of it."""
    return 1 + bool(item.arg & 4) if item.opname == "FORMAT_VALUE" else _TAKES.get(item.opname)


def effect_on_stack(item: Instruction) -> int:
    """How much higher the stack is behind an instruction."""
    return dis.stack_effect(item.opcode, item.arg if item.opcode >= dis.HAVE_ARGUMENT else None)
