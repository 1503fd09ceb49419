"""Loops over a size that changes: ``for i in range(n)``.

An unrolled loop holds the graph to the number of its rounds, and to no more than that: ``range(0, n, 128)`` has one round for many
sizes. Where the number of rounds was seen to change, each would be a graph of its own, without end: the graph breaks there, the
loop runs for real, and its body is a graph that all rounds of all calls share. ``fullgraph=True`` unrolls it all the same.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.settings import GRAPH_BREAKS

#: The instructions of an inlined comprehension before it takes the iterator, from Python 3.15 on.
_SET_UP = ("LOAD_FAST_AND_CLEAR", "SWAP", "MAKE_CELL", "BUILD_LIST", "BUILD_MAP", "BUILD_SET")


@rule(range)
def _range(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    frame = interpreter.frames[-1]
    is_plain = 0 < len(args) < 4 and not kwargs and all(type(item) in (int, torch.SymInt) for item in args)
    following = (item.opname for item in frame.decoded.instructions[frame.position + 1 :])
    is_loop = next((name for name in following if name not in _SET_UP), "") == "GET_ITER"
    if not is_plain or not is_loop or any(map(private_sizes.is_data_number, args)):
        return interpreter.call_native(range, args, kwargs)
    start, stop = (0, args[0]) if len(args) == 1 else args[:2]
    step = args[2] if len(args) == 3 else 1
    if all(type(item) is int for item in args):
        _note_rounds(interpreter, frame, len(range(*args)))
        return interpreter.call_native(range, args, kwargs)
    count = _rounds(start, stop, step)
    _note_rounds(interpreter, frame, count)
    return [start + number * step for number in range(int(count))]


def _rounds(start: Any, stop: Any, step: Any) -> Any:
    """``len(range(start, stop, step))`` as a formula."""
    if step == 0:
        raise ValueError("range() arg 3 must not be zero")
    distance, step = (stop - start, step) if step > 0 else (start - stop, -step)
    return 0 if distance <= 0 else (distance + step - 1) // step


def _note_rounds(interpreter: TracingInterpreter, frame: Frame, count: Any) -> None:
    """Break the graph before a loop whose number of rounds is a symbol, and was another one in an earlier capture."""
    settings, place = interpreter.trace.settings, (frame.code, frame.position)
    strategy = f"a graph break at the loop at instruction {frame.position} of {frame.code.co_qualname}"
    if not settings.allows(GRAPH_BREAKS) or not settings.allows(strategy):
        return
    interpreter.loops[place] += 1
    # Without a guard: the number of rounds of this call.
    today = count if type(count) is int else private_sizes.hint(count)
    if interpreter.trace.changes((*place, interpreter.loops[place]), today) and type(count) is not int:
        raise Break(
            "a loop has as many rounds as a size that changes from call to call",
            "compute all rounds at once, or say fullgraph=True: then each number of rounds is a graph of its own",
            otherwise=strategy,
            varies=True,
        )
