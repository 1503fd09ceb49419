"""Instructions after a graph break that run for real: they only move values about, and no graph would make them faster."""

from __future__ import annotations

from dovetail.frontend.code.frame import NULL, Frame
from dovetail.frontend.rules import real_rule
from dovetail.runtime.recipe_builder import ITERATOR_TYPES

_MOVING = frozenset(
    {
        *("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_FORWARD", "RETURN_CONST", "RETURN_VALUE", "END_FOR"),
        *("LOAD_CONST", "LOAD_FAST", "STORE_FAST", "BUILD_TUPLE", "COPY", "SWAP", "POP_TOP", "PUSH_NULL", "NOP"),
        *("POP_EXCEPT", "LOAD_FAST_BORROW", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT", "NOT_TAKEN", "POP_ITER"),
    }
)
#: By instruction: the types of what lies on top of the stack for which Python itself goes through the items.
_GOING_THROUGH: dict[str, frozenset[type]] = {
    "GET_ITER": ITERATOR_TYPES | {range},
    "FOR_ITER": ITERATOR_TYPES,
    "UNPACK_SEQUENCE": frozenset({tuple, list}),
}


@real_rule
def _trivial(frame: Frame) -> int:
    name = frame.decoded.instructions[frame.position].opname
    if name not in _GOING_THROUGH:
        return name in _MOVING
    # From Python 3.15 on, the iterator of a loop has a second place above it.
    item = frame.stack[-2 if frame.stack[-1] is NULL else -1]
    return type(item) in _GOING_THROUGH[name]
