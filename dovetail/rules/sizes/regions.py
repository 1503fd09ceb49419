"""A loop over a size that changes, or such a loop and the code up to where its results are joined, as one call.

``for i in range(0, n, 4): outs.append(f(x[:, i : i + 4]))`` leaves a list that is as long as the size says: unrolled, each length
is a graph of its own. But ``y = torch.cat(outs, dim=1)`` follows, and then nothing of the list is left. So the region from the loop
to there runs as one call: the shortest one after which only tensors, and values that no size decides, are read again. For a
recurrence that is the loop itself.

What a region may do is decided twice: by its instructions (:mod:`dovetail.rules.sizes.region_code`), and by watching it run without
values (:mod:`dovetail.rules.sizes.probed_calls`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.frontend.code.frame import NULL, Frame
from dovetail.frontend.instructions.shared import read_variable
from dovetail.frontend.interpreter.machine import Machine
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.rules.sizes.probed_calls import UNBOUND, ProbedCall
from dovetail.rules.sizes.pure_code import Reader
from dovetail.rules.sizes.region_code import Region, regions
from dovetail.rules.sizes.region_values import GivenTensors, ObjectValue, RefusedError, Value
from dovetail.rules.sizes.size_probes import NoRuleError
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state

_MOST_ROUNDS_WATCHED = 1024


@dataclass(frozen=True)
class Rounds:
    """The iterable of a loop: ``function(*args)``, which has ``count`` items."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    count: Any


def run_region(interpreter: TracingInterpreter, frame: Frame, rounds: Rounds) -> tuple[Any] | None:
    """Run the loop that is about to begin, or a longer region, as one call; None where that cannot be done.

    The value is that of the instruction that the frame stands at. After a loop it is an iterable without items; after a longer
    region the frame stands so that the last instruction of the region, which stores or returns the value, is next.
    """
    if private_state.is_any_autocast_on() or frame.current_exceptions:
        return None
    if not 0 < private_sizes.hint(rounds.count) <= _MOST_ROUNDS_WATCHED:
        return None
    for region in regions(frame, rounds.function is range):
        # Without a round there may be nothing to join, and Python leaves variables as they were.
        if not rounds.count > 0:
            return None
        try:
            return (_recorded(interpreter, frame, region, rounds),)
        except (RefusedError, NoRuleError):
            continue
    return None


def _recorded(interpreter: TracingInterpreter, frame: Frame, region: Region, rounds: Rounds) -> Any:
    """Record the region as one call, and bring the frame to its end; the value of its last instruction."""
    run, tensors = _run_of(interpreter, frame, region, rounds)
    call = ProbedCall(tensors, run)
    if not call.computes:
        raise RefusedError
    value, *left = call.record(interpreter, f"region at line {frame.line()}")
    for name, item in zip(sorted(region.left), left, strict=True):
        if item is UNBOUND:
            frame.locals.pop(name, None)
        else:
            frame.locals[name] = item
    if not region.has_value:
        if region.counter is not None:
            start, _, step = rounds.args
            frame.locals[region.counter] = start + (rounds.count - 1) * step
        return ()
    del frame.stack[len(frame.stack) - (run.taken or 0) :]
    frame.position = region.last - 1
    return value


class _Run:
    """A region as a function of the tensors that it is given: the value of its last instruction, then variables."""

    def __init__(
        self,
        frame: Frame,
        region: Region,
        variables: Mapping[str, Value],
        rounds: tuple[Callable[..., Any], Sequence[Value]],
        stack: Sequence[Value],
    ) -> None:
        # No region reads the values in its closure, and no graph is to keep them alive.
        cells = tuple(types.CellType() for _ in frame.code.co_freevars)
        self._function = types.FunctionType(frame.code, frame.globals, frame.code.co_name, None, cells)
        self._region = region
        self._variables = variables
        self._rounds = rounds
        self._stack = stack
        self._names = sorted(region.left)
        #: How many values of the stack were taken.
        self.taken: int | None = None

    def __call__(self, given: Sequence[torch.Tensor]) -> list[Any]:
        """Run it."""
        frame = Frame(self._function, {name: item(given) for name, item in self._variables.items()})
        stack = [item(given) for item in self._stack]
        function, args = self._rounds
        frame.stack = [*stack, function(*(item(given) for item in args))]
        Machine().run_between(frame, self._region.head, self._region.last)
        left = [frame.locals.get(name, UNBOUND) for name in self._names]
        if not self._region.has_value:
            return [None, *left]
        *rest, value = frame.stack
        taken = len(stack) - len(rest)
        is_rest = taken >= 0 and all(left is right for left, right in zip(rest, stack, strict=False))
        if not is_rest or self.taken not in (None, taken):
            raise NoRuleError
        self.taken = taken
        return [value, *left]


def _run_of(
    interpreter: TracingInterpreter, frame: Frame, region: Region, rounds: Rounds
) -> tuple[_Run, list[torch.Tensor]]:
    """A region as a function, and the tensors that it is given here. Raises :class:`RefusedError`."""
    own = {name for name in region.read if _is_own(interpreter, frame, region, name)}
    given = GivenTensors(interpreter)
    values = {name: read_variable(interpreter, frame, name) for name in region.read if name in frame.locals}
    variables: dict[str, Value] = {}
    # Tensors first: their sizes are then at hand.
    for name in sorted(values, key=lambda item: not isinstance(values[item], torch.Tensor)):
        if type(values[name]) not in (torch.SymInt, list):
            variables[name] = given.value(values[name])
    reader = Reader(interpreter, given)
    objects = {name: item for name, item in variables.items() if isinstance(item, ObjectValue)}
    reader.walk(frame, sorted(region.positions), objects)
    stack = _stack(frame, reader, given) if region.has_value else []
    for name, value in values.items():
        if name not in variables:
            variables[name] = given.value(value, changes=name in own)
    args = [given.value(item) for item in rounds.args]
    # A list that gets an item in each round has as many items as there are rounds.
    given.size(rounds.count)
    given.let_go()
    return _Run(frame, region, variables, (rounds.function, args), stack), given.tensors


def _is_own(interpreter: TracingInterpreter, frame: Frame, region: Region, name: str) -> bool:
    """Whether a variable holds a list of the program's own that nothing else refers to, and that nobody reads after the region."""
    if type(frame.locals.get(name)) is not list or name in region.after:
        return False
    # The variable, and the argument of this call.
    return interpreter.values.source_of(frame.locals[name]) is None and sys.getrefcount(frame.locals[name]) <= 2


def _stack(frame: Frame, reader: Reader, given: GivenTensors) -> list[Value]:
    """The values on top of the stack that the region may take from there, such as a function that is called with the list."""
    found: list[Value] = []
    for value in reversed(frame.stack):
        try:
            found.append(given.value(value) if value is NULL or is_leaf_value(value) else reader.callee(value))
        except RefusedError:
            break
    return found[::-1]
