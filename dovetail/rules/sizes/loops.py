"""Loops over a size that changes: ``for i in range(n)``, ``for part in x.split(4, dim=1)``.

An unrolled loop holds the graph to the number of its rounds, and to no more than that: ``range(0, n, 128)`` has one round for many
sizes. A loop that does nothing but compute is one call for all sizes (:mod:`dovetail.rules.sizes.regions`). Where the number of
rounds of another was seen to change, each would be a graph of its own, without end: the graph breaks there, the loop runs for real,
and its body is a graph that all rounds of all calls share. ``fullgraph=True`` unrolls it all the same.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.rules.sizes.regions import Rounds, run_region
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.settings import GRAPH_BREAKS


@rule(range)
def _range(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    frame = interpreter.frames[-1]
    is_plain = 0 < len(args) < 4 and not kwargs and all(type(item) in (int, torch.SymInt) for item in args)
    is_loop = frame.decoded.instructions[frame.position + 1].opname == "GET_ITER"
    if not is_plain or not is_loop or any(map(private_sizes.is_data_number, args)):
        return interpreter.call_native(range, args, kwargs)
    start, stop = (0, args[0]) if len(args) == 1 else args[:2]
    step = args[2] if len(args) == 3 else 1
    if all(type(item) is int for item in args):
        _note_rounds(interpreter, frame, len(range(*args)))
        return interpreter.call_native(range, args, kwargs)
    count = _rounds(start, stop, step)
    region = run_region(interpreter, frame, Rounds(range, (start, stop, step), count))
    if region is not None:
        return region[0]
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


def _register_parts(function: Any, name: str) -> None:
    @rule(function)
    def _parts(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``x.split(4)`` and ``x.unbind()`` as the iterable of a loop."""
        rounds = _rounds_of_parts(name, *args, **kwargs)
        region = None if rounds is None else run_region(interpreter, interpreter.frames[-1], rounds)
        return interpreter.call_torch(function, args, kwargs) if region is None else region[0]


for _name in ("split", "unbind"):
    _register_parts(getattr(torch, _name), _name)
    _register_parts(getattr(torch.Tensor, _name), _name)


def _rounds_of_parts(name: str, tensor: Any = None, *sizes: Any, dim: Any = 0, **others: Any) -> Rounds | None:
    """The rounds of a loop over parts; None where there is no symbolic number of them."""
    given = [*sizes, *others.values()]
    size = given.pop(0) if name == "split" and given else 1
    dim = given.pop(0) if given else dim
    is_known = type(size) is int and size > 0 and type(dim) is int and not given
    if not is_known or not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= dim < tensor.dim():
        return None
    length = tensor.shape[dim]
    if not private_sizes.is_symbolic(length) or private_sizes.is_data_number(length):
        return None
    if name == "split":
        return Rounds(torch.split, (tensor, size, dim), (length + size - 1) // size)
    return Rounds(torch.unbind, (tensor, dim), length)
