"""A loop over a size that changes, together with what makes tensors of its results again, as one call.

``for i in range(0, n, 4): outs.append(f(x[:, i : i + 4]))`` leaves a list that is as long as the size says: unrolled, each
length is a graph of its own. But ``y = torch.cat(outs, dim=1)`` follows, and then nothing of the list is left. So what runs
whole is the region from the loop to there: the shortest one after which only tensors, and values that no size decides, are read
again. It runs for real when the graph runs, with autograd around it (:mod:`dovetail.trace.sized`); which sizes its results
have is found out by probing (:mod:`dovetail.rules.sizes.size_probes`).

What a region may do is decided twice: by its instructions (:mod:`dovetail.rules.sizes.region_code`), and by watching it run on the
meta device. Tensors of another device and writes to what it is given are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import OutgrownError
from dovetail.frontend.code.frame import NULL, Frame
from dovetail.frontend.instructions.shared import read_variable
from dovetail.frontend.interpreter.machine import Machine
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.rules.sizes.pure_modules import Reader
from dovetail.rules.sizes.recurrent_networks import SizedFunction, call_sized
from dovetail.rules.sizes.region_code import Region, is_comprehension, read_attributes, regions
from dovetail.rules.sizes.region_values import FunctionValue, GivenTensors, ObjectValue, RefusedError, Value
from dovetail.rules.sizes.size_probes import NoRuleError, Probes, SizeFormula, formula, probe
from dovetail.rules.sizes.whole_loops import Watch, are_plain
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing

_MOST_ROUNDS_WATCHED = 512
_UNBOUND = object()


@dataclass(frozen=True)
class WholeRegion:
    """What the last instruction of a region takes; the frame stands before it."""

    value: Any


@dataclass(frozen=True)
class Rounds:
    """What a loop goes through: ``function(*args)``, which has ``count`` items."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    count: Any


def run_region_whole(interpreter: TracingInterpreter, frame: Frame, rounds: Rounds) -> WholeRegion | None:
    """Run the loop that is about to begin, and what follows, as one call; None where that cannot be done.

    Afterwards the frame stands so that the value is pushed and the last instruction, which stores or returns it, is next.
    """
    if private_state.is_any_autocast_on() or frame.current_exceptions:
        return None
    if not 0 < private_sizes.hint(rounds.count) <= _MOST_ROUNDS_WATCHED:
        return None
    for region in regions(frame):
        # Without a round there may be nothing to join.
        if not rounds.count > 0:
            return None
        try:
            call = _Call(interpreter, frame, region, rounds)
        except (RefusedError, NoRuleError):
            continue
        return WholeRegion(call.run())
    return None


@dataclass(frozen=True)
class _Same:
    """A result that is one of the arguments."""

    index: int


@dataclass(frozen=True)
class _Tensor:
    """A result that is a new tensor."""

    shape: tuple[SizeFormula, ...]
    dtype: torch.dtype
    depends: bool


@dataclass(frozen=True)
class _Fixed:
    """A result that no size decides: a leaf, an empty container, or nothing at all."""

    value: Any

    def is_like(self, value: Any, given: Sequence[torch.Tensor] = ()) -> bool:
        """Whether this is the value, today as well."""
        if self.value is _UNBOUND or value is _UNBOUND:
            return self.value is value
        return type(self.value) is type(value) and bool(self.value == value)


@dataclass(frozen=True)
class _Number:
    """A whole number that follows from a size."""

    value: SizeFormula

    def is_like(self, value: Any, given: Sequence[torch.Tensor]) -> bool:
        """Whether this is the number, today as well."""
        return type(value) is int and bool(value == self.value.of(given))


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
        self._function = frame.function
        self._region = region
        self._variables = variables
        self._rounds = rounds
        self._stack = stack
        self._names = sorted(region.left)
        #: How much of the stack was taken.
        self.taken: int | None = None

    def __call__(self, given: Sequence[torch.Tensor]) -> list[Any]:
        """Run it."""
        frame = Frame(self._function, {name: item.made(given) for name, item in self._variables.items()})
        stack = [item.made(given) for item in self._stack]
        function, args = self._rounds
        frame.stack = [*stack, function(*(item.made(given) for item in args))]
        Machine().run_between(frame, self._region.head, self._region.last)
        *rest, value = frame.stack
        taken = len(stack) - len(rest)
        is_rest = taken >= 0 and all(left is right for left, right in zip(rest, stack, strict=False))
        if not is_rest or self.taken not in (None, taken):
            raise RefusedError
        self.taken = taken
        return [value, *(frame.locals.get(name, _UNBOUND) for name in self._names)]


class _Call:
    """One region at its place in a program."""

    def __init__(self, interpreter: TracingInterpreter, frame: Frame, region: Region, rounds: Rounds) -> None:
        self._interpreter = interpreter
        self._frame = frame
        self._region = region
        given = GivenTensors(interpreter)
        values = {name: read_variable(interpreter, frame, name) for name in region.read if name in frame.locals}
        variables: dict[str, Value] = {}
        # Tensors first: their sizes are then at hand.
        for name in sorted(values, key=lambda item: not isinstance(values[item], torch.Tensor)):
            value = values[name]
            if type(value) is torch.SymInt or type(value) is list:
                continue
            variables[name] = given.value(value)
        objects = {name: item for name, item in variables.items() if isinstance(item, ObjectValue)}
        reader = Reader(interpreter, given)
        read_attributes(reader, region, frame, objects)
        stack = self._stack(reader, given)
        for name, value in values.items():
            if name not in variables:
                is_own = (
                    type(value) is list and name in region.own_lists and interpreter.values.source_of(value) is None
                )
                variables[name] = given.value(value, changes=is_own)
        args = [given.value(item) for item in rounds.args]
        # What is made in each round has as many parts as there are rounds.
        given.size(rounds.count)
        self._tensors = given.tensors
        self._run = _Run(frame, region, variables, (rounds.function, args), stack)
        self._draws = False
        self._forms = self._watch(given)
        if self._draws and self._tensors[0].device.type != "cpu":
            raise RefusedError

    def _stack(self, reader: Reader, given: GivenTensors) -> list[Value]:
        """What lies on top of the stack and may be taken from there: what is called with the list, and the like."""
        found: list[Value] = []
        for value in reversed(self._frame.stack):
            try:
                if is_comprehension(value):
                    cells = [cell.cell_contents for cell in value.__closure__ or ()]
                    comprehension = FunctionValue(value, tuple(map(given.value, cells)))
                    reader.comprehension(comprehension)
                    item: Value = comprehension
                elif value is NULL or is_leaf_value(value):
                    item = given.constant(value)
                else:
                    item = reader.callee(value)
            except (RefusedError, ValueError):
                break
            found.append(item)
        return found[::-1]

    def _watch(self, given: GivenTensors) -> list[Any]:
        """Run the region without values, to see what it does and what it leaves."""
        if not are_plain(self._tensors):
            raise RefusedError
        with_gradients = torch.is_grad_enabled()
        probes = Probes(self._tensors, [item.requires_grad and with_gradients for item in self._tensors])
        with private_tracing.disable_current_modes(), torch.set_grad_enabled(with_gradients):
            arguments, found = probe(probes, self._watched)
            containers = [id(value) for value in found[0] if type(value) in (list, dict)]
            if len(set(containers)) < len(containers):
                raise RefusedError
            forms = [self._form(arguments, list(results)) for results in zip(*found, strict=True)]
            if not any(isinstance(form, _Tensor) for form in forms):
                # Nothing would be run, and so nothing checked.
                raise RefusedError
            return forms

    def _watched(self, given: list[torch.Tensor]) -> list[Any]:
        watch = Watch()
        memory = {private_tensors.storage_key(item.untyped_storage()) for item in given}
        with watch:
            found = self._run(given)
        self._draws = self._draws or watch.draws
        if watch.is_refused or memory & watch.written or watch.devices - {"meta"}:
            raise NoRuleError
        return found

    def _form(self, arguments: list[list[torch.Tensor]], results: list[Any]) -> Any:
        """What one result is, at all sizes."""
        first = results[0]
        if all(type(result) is int for result in results) and len(set(results)) > 1:
            return _Number(formula(arguments, results))
        if not isinstance(first, torch.Tensor):
            fixed = _Fixed(first)
            is_empty = type(first) in (list, dict, tuple) and not first
            if not (is_empty or first is _UNBOUND or is_leaf_value(first)) or not all(map(fixed.is_like, results)):
                raise RefusedError
            return fixed
        same = [index for index, item in enumerate(arguments[0]) if item is first]
        if same:
            if any(result is not given[same[0]] for given, result in zip(arguments, results, strict=True)):
                raise RefusedError
            return _Same(same[0])
        for given, result in zip(arguments, results, strict=True):
            memory = {private_tensors.storage_key(item.untyped_storage()) for item in given}
            is_new = private_tensors.storage_key(result.untyped_storage()) not in memory
            is_alike = (result.dtype, result.dim(), result.requires_grad) == (
                first.dtype,
                first.dim(),
                first.requires_grad,
            )
            if not (is_new and is_alike and result.is_contiguous() and result.layout is torch.strided):
                raise RefusedError
        sizes = zip(*(result.shape for result in results), strict=True)
        return _Tensor(tuple(formula(arguments, item) for item in sizes), first.dtype, first.requires_grad)

    def run(self) -> Any:
        """Record the call, and bring the variables to where they are after the region; the value of its last instruction."""
        forms, run, draws = self._forms, self._run, self._draws
        tensors = [form for form in forms if isinstance(form, _Tensor)]

        def function(*given: torch.Tensor) -> list[torch.Tensor]:
            before = None if draws else torch.get_rng_state()
            found = run(given)
            if before is not None and not torch.equal(before, torch.get_rng_state()):
                raise OutgrownError(
                    "a loop that runs as one call has drawn random numbers, which it did not at capture",
                    advice="keep the loop out of the compiled function",
                )
            for form, value in zip(forms, found, strict=True):
                is_other = isinstance(form, _Same) and value is not given[form.index]
                if is_other or (isinstance(form, (_Fixed, _Number)) and not form.is_like(value, given)):
                    raise OutgrownError(
                        "a loop that runs as one call has left another value than at capture",
                        advice="compute the value outside of the loop, or keep the loop out of the compiled function",
                    )
                if isinstance(form, _Tensor) and value.requires_grad and not form.depends:
                    raise OutgrownError(
                        "a loop that runs as one call has a result with a gradient, which had none at capture",
                        advice="keep the loop out of the compiled function",
                    )
            return [value for form, value in zip(forms, found, strict=True) if isinstance(form, _Tensor)]

        def sizes(*given: torch.Tensor) -> list[tuple[list[Any], torch.dtype]]:
            return [([size.of(given) for size in form.shape], form.dtype) for form in tensors]

        results: list[torch.Tensor] = []
        if tensors:
            name = f"region at line {self._frame.line()}"
            results = list(call_sized(self._interpreter, SizedFunction(name, function, sizes, draws), self._tensors))
        left: list[Any] = []
        for form in forms:
            if isinstance(form, _Tensor):
                value = results.pop(0)
                if value.requires_grad and not form.depends:
                    value = self._interpreter.call_torch(torch.Tensor.detach, (value,), {})
                left.append(value)
            elif isinstance(form, _Number):
                left.append(form.value.of(self._tensors))
            else:
                left.append(self._tensors[form.index] if isinstance(form, _Same) else _fresh(form.value))
        for name, value in zip(sorted(self._region.left), left[1:], strict=True):
            if value is _UNBOUND:
                self._frame.locals.pop(name, None)
            else:
                self._frame.locals[name] = value
        del self._frame.stack[len(self._frame.stack) - (self._run.taken or 0) :]
        self._frame.position = self._region.last - 1
        return left[0]


def _fresh(value: Any) -> Any:
    """An empty container of a region of its own, for each run of the program."""
    return type(value)() if type(value) in (list, dict) else value
