"""``for i in range(n)`` where ``n`` follows from a size that changes.

An unrolled loop holds the graph to the number of its rounds, and to no more than that: ``range(0, n, 128)`` has one round for
many sizes. A loop that does nothing but compute with tensors is one call whatever the number is (:mod:`whole_loops
<dovetail.rules.sizes.whole_loops>`). Where the number of another was seen to change, each would be a graph of its own, without end.
So the graph is broken there: the loop runs for real, and its body is a graph that all rounds of all calls share.
``fullgraph=True`` unrolls it all the same.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.rules.sizes.whole_loops import run_loop_whole
from dovetail.rules.sizes.whole_regions import Rounds, run_region_whole
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.settings import GRAPH_BREAKS


@rule(range)
def _range(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    whole = bool(args) and len(args) < 4 and not kwargs and all(type(item) in (int, torch.SymInt) for item in args)
    frame = interpreter.frames[-1]
    following = frame.decoded.instructions[frame.position + 1]
    if not whole or following.opname != "GET_ITER":
        return interpreter.call_native(range, args, kwargs)
    if any(map(private_sizes.is_data_number, args)):
        return interpreter.call_native(range, args, kwargs)
    settings = interpreter.trace.settings
    start, stop = (0, args[0]) if len(args) == 1 else args[:2]
    step = args[2] if len(args) == 3 else 1
    is_symbolic = any(type(item) is torch.SymInt for item in args)
    if is_symbolic and run_loop_whole(interpreter, frame, start, stop, step):
        return interpreter.call_native(range, (0,), {})
    count = _rounds(start, stop, step) if is_symbolic else len(range(*args))
    if is_symbolic:
        region = run_region_whole(interpreter, frame, Rounds(range, (start, stop, step), count))
        if region is not None:
            return region.value
    place = (frame.code, frame.position)
    strategy = f"a graph break at the loop at instruction {frame.position} of {frame.code.co_qualname}"
    if settings.allows(GRAPH_BREAKS) and settings.allows(strategy):
        # Without a guard: the number of rounds of this call.
        today = count if type(count) is int else private_sizes.hint(count)
        interpreter.loops[place] += 1
        if interpreter.trace.changes((*place, interpreter.loops[place]), today) and is_symbolic:
            raise Break(
                "a loop has as many rounds as a size that changes from call to call",
                "compute all rounds at once, or say fullgraph=True: then each number of rounds is a graph of its own",
                otherwise=strategy,
                varies=True,
            )
    if not is_symbolic:
        return interpreter.call_native(range, args, kwargs)
    return [start + number * step for number in range(int(count))]


def _rounds(start: Any, stop: Any, step: Any) -> Any:
    """``len(range(start, stop, step))`` as a formula."""
    if step == 0:
        raise ValueError("range() arg 3 must not be zero")
    distance, step = (stop - start, step) if step > 0 else (start - stop, -step)
    return 0 if distance <= 0 else (distance + step - 1) // step
