"""The regions of a function that may run as one call: where they begin and end, and which variables they read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.code.frame import Frame
from dovetail.frontend.code.liveness import live_locals, may_read_frames, successors
from dovetail.rules.sizes.pure_code import PLAIN, is_plain

_PLAIN = PLAIN | {"STORE_SUBSCR", "STORE_SLICE"}
_ENDS = ("STORE_FAST", "STORE_DEREF", "RETURN_VALUE")
_MOST_INSTRUCTIONS = 600
_MOST_ENDS = 12
_MOST_BEFORE = 40


@dataclass(frozen=True)
class Region:
    """From the instruction that takes the iterable of a loop to one that stores or returns a value, or to the end of the loop.

    ``read`` are the variables that it may read first, ``after`` those that may be read after it, and ``left`` those of them that it
    writes. ``has_value``: it reaches behind the loop. ``counter`` is the variable of the loop where nothing else is stored in it,
    for a region that is the loop.
    """

    head: int
    last: int
    positions: frozenset[int]
    read: tuple[str, ...]
    left: frozenset[str]
    after: frozenset[str]
    has_value: bool
    counter: str | None = None


def regions(frame: Frame, counts: bool) -> Iterator[Region]:
    """The regions that begin with the loop whose iterable a frame is about to make, shortest first; ``counts``: over a range."""
    instructions = frame.decoded.instructions
    head = frame.position + 1
    # The iterable may be handed on first: ``enumerate(x.split(4))``.
    iterates = _iterates(frame, head)
    if iterates is None or may_read_frames(frame.code) or len(instructions) > _MOST_INSTRUCTIONS * 4:
        return
    stored = names(instructions[iterates + 2], "STORE")
    loop_end = frame.decoded.index_of[instructions[iterates + 1].argval]
    behind = range(loop_end, min(len(instructions), loop_end + _MOST_INSTRUCTIONS))
    ends = [at for at in behind if instructions[at].opname in _ENDS][:_MOST_ENDS]
    # The loop by itself comes first.
    for last, has_value in ((loop_end, False), *((at, True) for at in ends)):
        positions = _reached(frame, head, last)
        if positions is None:
            continue
        is_guarded = any(entry.start <= at < entry.end for entry in frame.decoded.exceptions for at in positions)
        if is_guarded or not all(is_plain(instructions[at].opname, _PLAIN) for at in positions):
            return
        is_counted = counts and not has_value and len(stored) == 1
        yield _region(frame, head, last, positions, has_value, stored[0] if is_counted else None)


def _region(
    frame: Frame, head: int, last: int, positions: frozenset[int], has_value: bool, counter: str | None
) -> Region:
    instructions = frame.decoded.instructions
    live = live_locals(frame.code)
    loads = {name for at in positions for name in names(instructions[at], "LOAD")}
    stores = [name for at in positions for name in names(instructions[at], "STORE")]
    after = live[last] - frozenset(names(instructions[last], "STORE") if has_value else ())
    counter = counter if counter is not None and stores.count(counter) == 1 else None
    left = frozenset(stores) & after - {counter}
    return Region(head, last, positions, tuple(sorted(loads & live[head])), left, after, has_value, counter)


def _iterates(frame: Frame, head: int) -> int | None:
    """The next instruction that begins a loop, with nothing but computation on the way."""
    instructions = frame.decoded.instructions
    for at in range(head, min(len(instructions) - 2, head + _MOST_BEFORE)):
        name = instructions[at].opname
        if name == "GET_ITER":
            return at if instructions[at + 1].opname == "FOR_ITER" else None
        if not is_plain(name, PLAIN) or "JUMP" in name or "STORE" in name or name == "RETURN_VALUE":
            return None
    return None


def names(instruction: Any, kind: str) -> tuple[str, ...]:
    """The local variables that an instruction loads or stores."""
    name, value = instruction.opname, instruction.argval
    if name == "STORE_FAST_LOAD_FAST":
        return (value[0],) if kind == "STORE" else tuple(value[1:])
    if not name.startswith(kind + "_FAST"):
        return ()
    return value if isinstance(value, tuple) else (value,)


def _reached(frame: Frame, head: int, last: int) -> frozenset[int] | None:
    """The instructions between, without the last; None where the function may end without coming to it."""
    found: set[int] = set()
    waiting = [head]
    while waiting:
        at = waiting.pop()
        if at == last or at in found:
            continue
        if frame.decoded.instructions[at].opname in ("RETURN_VALUE", "RETURN_CONST") or at < head:
            return None
        found.add(at)
        waiting += successors(frame.decoded, at)
    return frozenset(found)
