"""Instructions after a graph break that run for real: they only move values about, and no graph would make them faster.

What they leave on the stack would be an argument of the code that goes on, the constants among them too. So they run as far as
the stack is no higher than it was.
"""

from __future__ import annotations

import functools
import types

from dovetail.frontend.code.frame import NULL, Frame, decode
from dovetail.frontend.rules import real_rule
from dovetail.rules.python.rest_of_messages import effect_on_stack
from dovetail.runtime.recipe_builder import ITERATOR_TYPES

_LEAVING = ("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_FORWARD", "RETURN_CONST", "RETURN_VALUE")
_MOVING = frozenset(
    {
        *("LOAD_CONST", "LOAD_FAST", "STORE_FAST", "BUILD_TUPLE", "COPY", "SWAP", "POP_TOP", "PUSH_NULL", "NOP"),
        *("POP_EXCEPT", "LOAD_FAST_BORROW", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT", "NOT_TAKEN", "POP_ITER"),
        *("END_FOR", *_LEAVING),
    }
)
#: By instruction: the types of what lies on top of the stack for which Python itself goes through the items.
_GOING_THROUGH: dict[str, frozenset[type]] = {
    "GET_ITER": ITERATOR_TYPES | {range},
    "FOR_ITER": ITERATOR_TYPES,
    "UNPACK_SEQUENCE": frozenset({tuple, list}),
}


@functools.lru_cache(maxsize=4096)
def _moves(code: types.CodeType) -> list[int | None]:
    """For each instruction how many run from there, as far as it is known: they are found when they are asked for."""
    return [None] * len(decode(code).instructions)


def _count(code: types.CodeType, start: int) -> int:
    count = depth = 0
    for position, item in enumerate(decode(code).instructions[start:], 1):
        if item.opname not in _MOVING:
            break
        if item.opname in _LEAVING:
            return position if depth <= 0 or item.opname.startswith("RETURN") else count
        depth += effect_on_stack(item)
        if depth <= 0:
            count = position
    return count


def _trivial(frame: Frame) -> int:
    item = frame.decoded.instructions[frame.position]
    if item.opname in _GOING_THROUGH:
        # From Python 3.15 on, the iterator of a loop has a second place above it.
        top = frame.stack[-2 if frame.stack[-1] is NULL else -1]
        return type(top) in _GOING_THROUGH[item.opname]
    moves = _moves(frame.code)
    count = moves[frame.position]
    if count is None:
        count = moves[frame.position] = _count(frame.code, frame.position)
    return count


# The cheapest of these rules is asked first.
real_rule.insert(0, _trivial)
