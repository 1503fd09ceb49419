"""The regions of a function that may run as one call: where they begin and end, and which variables they read."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.code.frame import Frame
from dovetail.frontend.code.liveness import live_locals, may_read_frames, successors
from dovetail.rules.sizes.pure_code import LIST_METHODS, PLAIN, Reader, is_plain
from dovetail.rules.sizes.region_values import ObjectValue

_PLAIN = PLAIN | {"STORE_SUBSCR", "STORE_SLICE"}
# What may stand between the making of lists and their names, in ``first, count, second = [], 0, []``.
_ASSIGNS = frozenset({"STORE_FAST", "STORE_FAST_STORE_FAST", "SWAP", "LOAD_CONST"})
_MOST_INSTRUCTIONS = 600
_MOST_ENDS = 12
_MOST_BEFORE = 40


@dataclass(frozen=True)
class Region:
    """From the instruction that takes the iterable of a loop to one that stores or returns a value, or to the end of the loop.

    ``read`` are the variables that it may read first, ``left`` those that it writes and that may be read after it, and
    ``own_lists`` those that can be nothing but a list which the function has made and nothing else knows of. ``counter`` is the
    variable of the loop where nothing else is stored in it, for a region that is the loop.
    """

    head: int
    last: int
    positions: frozenset[int]
    read: tuple[str, ...]
    left: frozenset[str]
    own_lists: frozenset[str]
    has_value: bool
    counter: str | None = None


def regions(frame: Frame, counts: bool) -> Iterator[Region]:
    """The regions that begin with the loop whose iterable a frame is about to make, shortest first; ``counts``: over a range."""
    code, decoded = frame.code, frame.decoded
    instructions = decoded.instructions
    head = frame.position + 1
    # The iterable may be handed on first: ``enumerate(x.split(4))``.
    iterates = _iterates(frame, head)
    if iterates is None or may_read_frames(code) or len(instructions) > _MOST_INSTRUCTIONS * 4:
        return
    # A comprehension is a function that is called with the iterator, up to Python 3.11.
    is_loop = instructions[iterates + 1].opname == "FOR_ITER"
    if not is_loop and not any(is_comprehension(item) for item in frame.stack):
        return
    exit_position = decoded.index_of[instructions[iterates + 1].argval] if is_loop else iterates + 1
    stored = _names(instructions[iterates + 2], "STORE") if is_loop and counts else ()
    ends = 0
    for last in range(exit_position - is_loop, min(len(instructions), exit_position + _MOST_INSTRUCTIONS)):
        # The loop by itself comes first.
        is_alone = last < exit_position
        last = exit_position if is_alone else last
        if not is_alone and instructions[last].opname not in ("STORE_FAST", "STORE_DEREF", "RETURN_VALUE"):
            continue
        positions = _reached(frame, head, last)
        if positions is None:
            continue
        if not all(is_plain(instructions[at].opname, _PLAIN) for at in positions) or _is_guarded(frame, positions):
            return
        region = _region(frame, head, last, positions, stored[0] if is_alone and len(stored) == 1 else None, is_alone)
        if region is not None:
            yield region
        ends += 1
        if ends == _MOST_ENDS:
            return


def _region(
    frame: Frame, head: int, last: int, positions: frozenset[int], counter: str | None, is_alone: bool
) -> Region | None:
    instructions = frame.decoded.instructions
    live = live_locals(frame.code)
    loads = {name for at in positions for name in _names(instructions[at], "LOAD")}
    stores = [name for at in positions for name in _names(instructions[at], "STORE")]
    read = tuple(sorted(loads & live[head]))
    own = frozenset(name for name in read if _is_own_list(frame, name, head, positions))
    after = live[last] - (frozenset() if is_alone else frozenset(_names(instructions[last], "STORE")))
    if own & after:
        return None
    counter = counter if counter is not None and stores.count(counter) == 1 else None
    left = frozenset(stores) & after - {counter}
    return Region(head, last, positions, read, left, own, not is_alone, counter)


def _iterates(frame: Frame, head: int) -> int | None:
    """The next instruction that begins a loop, with nothing but computation on the way."""
    instructions = frame.decoded.instructions
    for at in range(head, min(len(instructions), head + _MOST_BEFORE)):
        name = instructions[at].opname
        if name == "GET_ITER":
            return at
        if not is_plain(name, PLAIN) or "JUMP" in name or "STORE" in name or name == "RETURN_VALUE":
            return None
    return None


def is_comprehension(value: object) -> bool:
    """Whether something is the function of a comprehension of a list."""
    return isinstance(value, types.FunctionType) and value.__code__.co_name == "<listcomp>"


def _names(instruction: Any, kind: str) -> tuple[str, ...]:
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


def _is_guarded(frame: Frame, positions: frozenset[int]) -> bool:
    """Whether there are handlers of exceptions, or contexts."""
    return any(entry.start <= at < entry.end for entry in frame.decoded.exceptions for at in positions)


def _is_own_list(frame: Frame, name: str, head: int, positions: frozenset[int]) -> bool:
    """Whether a variable holds a list that the function made, and that it did nothing with so far but append."""
    if name in frame.code.co_varnames[: frame.code.co_argcount + frame.code.co_kwonlyargcount]:
        return False
    instructions = frame.decoded.instructions
    is_list = False
    for at, instruction in enumerate(instructions):
        if name in _names(instruction, "STORE"):
            before = at
            while instructions[before].opname in _ASSIGNS:
                before -= 1
            is_made = instructions[before].opname == "BUILD_LIST"
            # A list of another kind is one that this loop never sees, or one that was looked into.
            reaches = _uses(frame, name, at + 1, head, positions)
            if reaches is None or (reaches and not is_made):
                return False
            is_list = is_list or reaches
    return is_list


def _uses(frame: Frame, name: str, start: int, head: int, positions: frozenset[int]) -> bool | None:
    """Whether what is stored in a variable may come to a region; None where something else than a method for appending
    takes it on a way there.
    """
    instructions = frame.decoded.instructions
    seen: set[int] = set()
    waiting, reaches, is_used = [start], False, False
    while waiting:
        at = waiting.pop()
        if at == head:
            reaches = True
        if at in seen or at in positions:
            continue
        seen.add(at)
        instruction = instructions[at]
        if name in _names(instruction, "LOAD"):
            following = instructions[at + 1]
            is_appended = following.opname in ("LOAD_METHOD", "LOAD_ATTR") and following.argval in LIST_METHODS
            is_used = is_used or not is_appended
        if name not in _names(instruction, "STORE"):
            waiting += successors(frame.decoded, at)
    return None if reaches and is_used else reaches


def read_attributes(reader: Reader, region: Region, frame: Frame, objects: Mapping[str, ObjectValue]) -> None:
    """Read, with their guards, the global names of a region and all attributes of the objects that it is given; check that it calls
    nothing but what computes. Raises :class:`RefusedError`.
    """
    current: Any = None
    for at in sorted(region.positions):
        instruction = frame.decoded.instructions[at]
        following: Any = None
        if loaded := _names(instruction, "LOAD"):
            following = objects.get(loaded[-1])
            following_name = frame.decoded.instructions[at + 1].opname
            if following is not None and following_name not in ("LOAD_ATTR", "LOAD_METHOD"):
                reader.called(following)
        elif instruction.opname == "LOAD_GLOBAL":
            following = reader.global_name(frame, instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            following = reader.attribute(current, instruction.argval)
        current = following
