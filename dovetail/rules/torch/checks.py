"""Branches that only raise: ``if labels.max() >= vocabulary: raise ValueError(...)``.

Which way such a branch goes depends on data, and one of the two ways ends the call. The graph takes the other one and checks, as
one of its operators, that this was right. Where it was not, nothing has been written yet, and the call runs eagerly: it raises
what the user's own line raises.

>>> import dovetail
>>> def f(x):
...     if x.min() < 0:
...         raise ValueError("a negative number")
...     return x.sqrt()
>>> dovetail.compile(f, fullgraph=True, backend="aten")(torch.tensor([4.0]))
tensor([2.])
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame, decode
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.rules.torch.whole_functions import number_as_tensor
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import ASSUMPTION

_MOST_INSTRUCTIONS = 200
_UNKNOWN: tuple[type[BaseException], ...] = (Break, *private_tracing.DATA_DEPENDENT_ERRORS)


class Checks(TracingInterpreter):
    """The part of the interpreter that takes the way on which nothing raises."""

    def truth_at_jump(self, frame: Frame, value: Any, target: int, wanted: bool) -> bool:
        """The truth of a value for a jump to ``target`` where it is ``wanted``."""
        is_tensor = isinstance(value, torch.Tensor)
        truth: bool | None = None
        if is_tensor or private_sizes.is_data_number(value):
            truth = self._way_without_raise(frame, target, wanted)
        if truth is None:
            return bool(self.truth(value))
        before = self.trace.data_symbols()
        try:
            # A constant tensor knows its truth.
            if is_tensor:
                return bool(self.truth(value))
        except _UNKNOWN:
            # The question itself has made a number out of data.
            self.trace.forgive_data_symbols(before)
        with private_calls.no_torch_function(), torch.no_grad():
            # The user's line itself does not go into it: a backend may put the message into a string literal of C++.
            message = f"{ASSUMPTION}the check in line {frame.line()} does not raise"
            # A number goes back into a tensor: what the shape environment learns of one, it would put in its place.
            condition = value.detach().to("cpu") if is_tensor else number_as_tensor(value)
            condition = condition.bool()
            torch.ops.aten._assert_async.msg(condition if truth else condition.logical_not(), message)
        return truth

    def _way_without_raise(self, frame: Frame, target: int, wanted: bool) -> bool | None:
        """The truth with which the program goes on; None where both ways go on, or nothing can be checked now."""
        trace = self.trace
        if trace.phase != "forward" or trace.settings.shapes.data_sizes == "break" or self.values.in_backward:
            return None
        # From Python 3.13 on, the instruction before the jump may be the one that asks.
        jumps = frame.decoded.instructions[frame.position].opname.startswith("POP_JUMP")
        jumping, staying = _only_raises(frame.code, target), _only_raises(frame.code, frame.position + 2 - jumps)
        return None if jumping is staying else wanted if staying else not wanted


@functools.lru_cache(maxsize=4096)
def _only_raises(code: types.CodeType, start: int) -> bool:
    """Whether all ways from an instruction on end in a ``raise``, without a loop."""
    decoded = decode(code)
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        position = waiting.pop()
        if position in seen:
            continue
        seen.add(position)
        if position >= len(decoded.instructions) or len(seen) > _MOST_INSTRUCTIONS:
            return False
        instruction = decoded.instructions[position]
        name = instruction.opname
        if name == "RAISE_VARARGS":
            continue
        if name.startswith(("RETURN", "YIELD", "SEND", "RERAISE", "JUMP_BACKWARD", "FOR_ITER")):
            return False
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            target = decoded.index_of[instruction.argval]
            if target <= position:
                return False
            waiting.append(target)
            if name == "JUMP_FORWARD":
                continue
        waiting.append(position + 1)
    return True
