"""A loop over a size that changes, together with what makes tensors of its results again, as one call.

``for i in range(0, n, 4): outs.append(f(x[:, i : i + 4]))`` leaves a list that is as long as the size says: unrolled, each
length is a graph of its own. But ``y = torch.cat(outs, dim=1)`` follows, and then nothing of the list is left. So what runs
whole is the region from the loop to there: the shortest one after which only tensors, and values that no size decides, are read
again. It runs for real when the graph runs, with autograd around it (:mod:`dovetail.trace.sized`); which sizes its results
have is found out by probing (:mod:`dovetail.frontend.size_probes`).

What a region may do is decided twice: by its instructions (:mod:`dovetail.frontend.region_code`), and by watching it run on the
meta device. Random operators, tensors of another device and writes to what it is given are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail import torch_private_recordings as private_recordings
from dovetail import torch_private_sizes as private_sizes
from dovetail import torch_private_torch_compile as private_compile
from dovetail.errors import OutgrownError
from dovetail.frontend.frame import Frame
from dovetail.frontend.instructions.shared import read_variable
from dovetail.frontend.machine import Machine
from dovetail.frontend.region_code import Region, read_attributes, regions
from dovetail.frontend.region_values import GivenTensors, ObjectValue, RefusedError, Value
from dovetail.frontend.size_probes import NoRuleError, Probes, SizeFormula, formula, probe
from dovetail.frontend.sized_calls import SizedFunction, call_sized
from dovetail.frontend.values import is_leaf_value
from dovetail.frontend.whole_loops import Watch, are_plain

_MOST_ROUNDS_WATCHED = 512
_UNBOUND = object()


@dataclass(frozen=True)
class WholeRegion:
    """What the last instruction of a region takes; the frame stands before it."""

    value: Any


def run_region_whole(interpreter: Any, frame: Frame, start: Any, stop: Any, step: Any) -> WholeRegion | None:
    """Run the loop whose ``range`` is about to be made, and what follows, as one call; None where that cannot be done.

    Afterwards the frame stands so that the value is pushed and the last instruction, which stores or returns it, is next.
    """
    if private_compile.is_any_autocast_on() or frame.current_exceptions:
        return None
    today = len(range(*map(private_sizes.hint, (start, stop, step))))
    if not 0 < today <= _MOST_ROUNDS_WATCHED:
        return None
    distance, width = (stop - start, step) if step > 0 else (start - stop, -step)
    for region in regions(frame):
        # Without a round there may be nothing to join.
        if not distance > 0:
            return None
        rounds = (distance + width - 1) // width
        try:
            call = _Call(interpreter, frame, region, (start, stop, step), rounds)
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

    def __init__(self, frame: Frame, region: Region, variables: Mapping[str, Value], bounds: Sequence[Value]) -> None:
        self._function = frame.function
        self._region = region
        self._variables = variables
        self._bounds = bounds
        self._names = sorted(region.left)

    def __call__(self, given: Sequence[torch.Tensor]) -> list[Any]:
        """Run it."""
        frame = Frame(self._function, {name: item.made(given) for name, item in self._variables.items()})
        frame.stack = [range(*(item.made(given) for item in self._bounds))]
        Machine().run_between(frame, self._region.head, self._region.last)
        if len(frame.stack) != 1:
            raise RefusedError
        return [frame.stack[0], *(frame.locals.get(name, _UNBOUND) for name in self._names)]


class _Call:
    """One region at its place in a program."""

    def __init__(self, interpreter: Any, frame: Frame, region: Region, bounds: Sequence[Any], rounds: Any) -> None:
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
        read_attributes(interpreter, region, frame, objects, given)
        for name, value in values.items():
            if name not in variables:
                is_own = (
                    type(value) is list and name in region.own_lists and interpreter.values.source_of(value) is None
                )
                variables[name] = given.value(value, changes=is_own)
        places = [given.size(item) for item in bounds]
        # What is made in each round has as many parts as there are rounds.
        given.size(rounds)
        self._tensors = given.tensors
        self._run = _Run(frame, region, variables, places)
        self._forms = self._watch(given)

    def _watch(self, given: GivenTensors) -> list[Any]:
        """Run the region without values, to see what it does and what it leaves."""
        if not are_plain(self._tensors):
            raise RefusedError
        with_gradients = torch.is_grad_enabled()
        probes = Probes(self._tensors, [item.requires_grad and with_gradients for item in self._tensors])
        with private.disable_current_modes(), torch.set_grad_enabled(with_gradients):
            arguments, found = probe(probes, self._watched)
            containers = [id(value) for value in found[0] if type(value) in (list, dict)]
            if len(set(containers)) < len(containers):
                raise RefusedError
            return [self._form(arguments, list(results)) for results in zip(*found, strict=True)]

    def _watched(self, given: list[torch.Tensor]) -> list[Any]:
        watch = Watch()
        memory = {private_recordings.storage_key(item.untyped_storage()) for item in given}
        with watch:
            found = self._run(given)
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
            memory = {private_recordings.storage_key(item.untyped_storage()) for item in given}
            is_new = private_recordings.storage_key(result.untyped_storage()) not in memory
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
        forms, run = self._forms, self._run
        tensors = [form for form in forms if isinstance(form, _Tensor)]

        def function(*given: torch.Tensor) -> list[torch.Tensor]:
            found = run(given)
            for form, value in zip(forms, found, strict=True):
                if isinstance(form, (_Fixed, _Number)) and not form.is_like(value, given):
                    raise OutgrownError(
                        "a loop that runs as one call has left another value than at capture",
                        advice="compute the value outside of the loop, or keep the loop out of the compiled function",
                    )
            return [value for form, value in zip(forms, found, strict=True) if isinstance(form, _Tensor)]

        def sizes(*given: torch.Tensor) -> list[tuple[list[Any], torch.dtype]]:
            return [([size.of(given) for size in form.shape], form.dtype) for form in tensors]

        results: list[torch.Tensor] = []
        if tensors:
            name = f"region at line {self._frame.line()}"
            results = list(call_sized(self._interpreter, SizedFunction(name, function, sizes), self._tensors))
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
        self._frame.position = self._region.last - 1
        return left[0]


def _fresh(value: Any) -> Any:
    """An empty container of a region of its own, for each run of the program."""
    return type(value)() if type(value) in (list, dict) else value
