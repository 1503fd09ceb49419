"""Loops over a size that changes: ``for i in range(n)``.

An unrolled loop holds the graph to the number of its rounds, and to no more than that: ``range(0, n, 128)`` has one round for many
sizes. Where the number of rounds was seen to change, each would be a graph of its own, without end: the graph breaks there, the
loop runs for real, and its body is a graph that all rounds of all calls share. ``fullgraph=True`` unrolls it all the same.
"""

from __future__ import annotations

import dis
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.settings import GRAPH_BREAKS

#: The instructions of an inlined comprehension before it takes the iterator, from Python 3.15 on.
_SET_UP = ("LOAD_FAST_AND_CLEAR", "SWAP", "MAKE_CELL", "BUILD_LIST", "BUILD_MAP", "BUILD_SET")

_INDEXING = ("BINARY_SUBSCR", "STORE_SUBSCR")
_LOADS = ("LOAD_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_DEREF", "LOAD_GLOBAL", "PUSH_NULL")
#: Instructions that compute other parts of an index.
_OF_OTHERS = (*_LOADS, "LOAD_ATTR", "LOAD_METHOD", "BINARY_", "UNARY_", "BUILD_SLICE", "PRECALL", "CALL")


@rule(range)
def _range(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    frame = interpreter.frames[-1]
    is_plain = 0 < len(args) < 4 and not kwargs and all(type(item) in (int, torch.SymInt) for item in args)
    following = (item.opname for item in frame.decoded.instructions[frame.position + 1 :])
    is_loop = next((name for name in following if name not in _SET_UP), "") == "GET_ITER"
    if is_plain and not is_loop and isinstance(target := _indexed(frame), torch.Tensor):
        return _as_index(interpreter, target, args)
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


def _as_index(interpreter: TracingInterpreter, target: torch.Tensor, args: tuple[Any, ...]) -> Any:
    """The numbers of a range as a tensor, into which torch turns a sequence in an index."""
    start, stop = (0, args[0]) if len(args) == 1 else args[:2]
    step = args[2] if len(args) == 3 else 1
    changes = any(type(item) is torch.SymInt for item in args) and not any(map(private_sizes.is_data_number, args))
    is_torchs = type(target).__getitem__ is torch.Tensor.__getitem__
    if not changes or not is_torchs or type(step) is not int or type(_rounds(start, stop, step)) is int:
        return interpreter.call_native(range, args, {})
    return interpreter.call_torch(torch.arange, (start, stop, step), {"device": target.device})


def _indexed(frame: Frame) -> Any:
    """The object indexed by the result of the present call, by itself or as a part of a tuple, and by nothing else; else None."""
    above = 0
    instructions = iter(frame.decoded.instructions[frame.position + 1 :])
    for item in instructions:
        name, count = item.opname, item.arg or 0
        if name in _INDEXING and above == 0:
            return frame.stack[-1] if frame.stack else None
        if name == "BUILD_TUPLE" and above < count:
            place = count - above
            is_key = next(instructions).opname in _INDEXING
            return frame.stack[-place] if is_key and place <= len(frame.stack) else None
        if not name.startswith(_OF_OTHERS):
            return None
        effect = dis.stack_effect(item.opcode, *([item.arg] if item.opcode >= dis.HAVE_ARGUMENT else []))
        # All but loads take something off the stack, and put one thing there.
        if not name.startswith(_LOADS) and max(1, 1 - effect) > above:
            return None
        above += effect
    return None


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
