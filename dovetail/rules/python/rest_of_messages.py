"""After a graph break in the arguments of a message, the rest of its call runs for real: ``print(f"{step}: {loss.item():.3f}")``.

So does a message that is given just behind a graph break. The texts and numbers in it are other ones at every call; as arguments of
the code that goes on they would be guarded, and each call would compile that code anew.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import types
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.code.frame import Frame, Instruction
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.rules import real_rule
from dovetail.guards.reading import instance_dict
from dovetail.rules.python.log_messages import CALLS, callee_place, effect_on_stack, gives_message, values_taken

#: Calls in an argument that read a number or write a text; any other may be worth a graph.
_METHODS = frozenset({"item", "tolist", "numel", "size", "dim", "format", "join"})
_FUNCTIONS = (str, repr, len, float, int, round)
_BUILDING = ("BUILD_STRING", "BUILD_TUPLE", "BUILD_LIST")


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
    count = _count(frame)
    if not count:
        silent.add(frame.position)
    return count


def _count(frame: Frame) -> int:
    """How many instructions are left to the end of a call that gives a message; 0 where none is ahead."""
    instructions, stack = frame.decoded.instructions, list(frame.stack)
    for position in range(frame.position, len(instructions)):
        item = instructions[position]
        if item.opname in ("PRECALL", "KW_NAMES"):
            continue
        if item.is_jump_target and position > frame.position:
            return 0
        if item.opname in CALLS:
            place = callee_place(item, len(stack))
            callee = stack[max(place, 0) : max(place + 2, 0)]
            if any(value is print or gives_message(value) for value in callee):
                return position + 1 - frame.position
            if not any(map(_is_reading, callee)):
                return 0
            stack[place:] = [None]
            continue
        taken = item.arg if item.opname in _BUILDING else values_taken(item)
        if taken is None or taken > len(stack):
            return 0
        # An instruction that loads a function may leave a second place beside it.
        count = taken + effect_on_stack(item)
        stack[len(stack) - taken :] = [_loaded(frame, item, stack[-1] if taken else None)] * count
    return 0


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
    own: Any = None
    with contextlib.suppress(AttributeError):
        own = instance_dict(owner)
    function = getattr(type(owner), name, None) if isinstance(owner, logging.Logger) else None
    inherited = types.MethodType(function, owner) if isinstance(function, types.FunctionType) else _Method(name)
    # A class may say that its objects have something else for a dictionary.
    return own.get(name, inherited) if isinstance(own, (dict, types.MappingProxyType)) else inherited
