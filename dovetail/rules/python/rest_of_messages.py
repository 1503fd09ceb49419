"""After a graph break in the arguments of a message, the rest of its call runs for real: ``print(f"{step}: {loss.item():.3f}")``.

So does a message that is given just behind a graph break. The texts and numbers in it are other ones at every call; as arguments of
the code that goes on they would be guarded, and each call would compile that code anew. For the same reason the graph breaks where
a message tells a size that changes from call to call: formatted in the graph, it would hold the graph to the size of today.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import logging
import types
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.code.frame import Break, Frame, Instruction
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import format_rule, real_rule
from dovetail.guards.reading import instance_dict
from dovetail.rules.python.log_messages import gives_message, is_dropped
from dovetail.torch_private import sizes as private_sizes

#: Calls in an argument that read a number or write a text; any other may be worth a graph.
_METHODS = frozenset({"item", "tolist", "numel", "size", "dim", "format", "join"})
_FUNCTIONS = (str, repr, len, float, int, round)
_BUILDING = ("BUILD_STRING", "BUILD_TUPLE", "BUILD_LIST")
_CALLS = ("CALL", "CALL_KW")
#: How many values each instruction that may come before the call takes off the stack.
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


@real_rule
def _rest_of_a_message(frame: Frame) -> int:
    return _message_ahead(frame, frame.position, [*frame.stack])[0]


def _message_ahead(frame: Frame, start: int, stack: list[Any]) -> tuple[int, Any]:
    """How many instructions there are from one to the end of a call that gives a message, and what is called then.

    ``stack`` is what there is at the first of them. Where no such call is ahead, there are 0.
    """
    instructions = frame.decoded.instructions
    for position in range(start, len(instructions)):
        item = instructions[position]
        if item.opname in ("PRECALL", "KW_NAMES"):
            continue
        if item.is_jump_target and position > start:
            return 0, None
        if item.opname in _CALLS:
            # The function and the NULL beside it are below the arguments and their names.
            place = len(stack) - item.arg - (3 if item.opname == "CALL_KW" else 2)
            callee = stack[max(place, 0) : max(place + 2, 0)]
            message = next((value for value in callee if value is print or gives_message(value)), None)
            if message is not None:
                return position + 1 - start, message
            if not any(map(_is_reading, callee)):
                return 0, None
            stack[place:] = [None]
            continue
        taken = item.arg if item.opname in _BUILDING else _TAKES.get(item.opname)
        if item.opname == "FORMAT_VALUE":
            taken = 1 + bool(item.arg & 4)
        if taken is None or taken > len(stack):
            return 0, None
        # An instruction that loads a function may leave a second place beside it.
        count = taken + dis.stack_effect(item.opcode, item.arg if item.opcode >= dis.HAVE_ARGUMENT else None)
        stack[len(stack) - taken :] = [_loaded(frame, item, stack[-1] if taken else None)] * count
    return 0, None


def _is_reading(value: Any) -> bool:
    return value.name in _METHODS if isinstance(value, _Method) else any(value is item for item in _FUNCTIONS)


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
    own: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):
        own = instance_dict(owner)
    function = getattr(type(owner), name, None) if isinstance(owner, logging.Logger) else None
    inherited = types.MethodType(function, owner) if isinstance(function, types.FunctionType) else _Method(name)
    return own.get(name, inherited)


@format_rule
def _number_in_a_message(interpreter: TracingInterpreter, frame: Frame, value: Any, specification: str) -> Any:
    # The number is off the stack already, and the text is not there yet.
    count, function = _message_ahead(frame, frame.position + 1, [*frame.stack, None])
    if count and not private_sizes.is_data_number(value) and is_dropped(interpreter, function):
        # Nobody sees the text.
        return format(private_sizes.hint(value), specification)
    if interpreter.trace.settings.one_graph or not count:
        return NotImplemented
    raise Break("a message tells a number that changes from call to call", 'hand it over: logger.info("%d rows", n)')
