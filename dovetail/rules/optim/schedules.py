"""Schedules of learning rates inside of a captured step: their ``step()`` is called for real, when the graph has run.

A schedule computes numbers from numbers, and branches on its count of steps: captured, each phase of it would be an entry of its
own. But what it writes, the rates, is read by the next step only. So the call becomes an effect of the entry, the last one.
Where the rest of the function looks at what the schedule has written, it is interpreted like other code.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils

from dovetail.aot.nodes import memory_of
from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.guards import ComputedSource, Equals, ItemSource, Source, Step
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace import Retry

#: Schedules that run no code of the program's.
KINDS: frozenset[Any] = frozenset(
    {
        *(lr_scheduler.StepLR, lr_scheduler.MultiStepLR, lr_scheduler.ConstantLR),
        *(lr_scheduler.LinearLR, lr_scheduler.ExponentialLR, lr_scheduler.SequentialLR),
        *(lr_scheduler.CosineAnnealingLR, lr_scheduler.ChainedScheduler, lr_scheduler.ReduceLROnPlateau),
        *(lr_scheduler.CyclicLR, lr_scheduler.CosineAnnealingWarmRestarts, lr_scheduler.OneCycleLR),
        *(lr_scheduler.PolynomialLR, swa_utils.SWALR),
    }
)
#: Keys that schedules write in the groups of an optimizer.
WRITTEN_KEYS = frozenset(
    {"lr", "initial_lr", "momentum", "betas", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}
)


#: The strategy of this module; it is given up where the program looks at what a schedule writes.
AFTER_THE_GRAPH = "schedules are called after the graph"


def _read_too_early(reason: str) -> Retry:
    """The program looks at what a schedule writes that has not been called yet: capture again with all calls in their order."""
    return Retry(reason, without=AFTER_THE_GRAPH)


def _parts(schedule: Any) -> Iterator[Any]:
    """A schedule and those that it is made of."""
    yield schedule
    for part in vars(schedule).get("_schedulers", ()):
        yield from _parts(part)


def can_wait(schedule: Any, steps: float = 1) -> bool:
    """Whether nothing but the numbers of an optimizer depends on a schedule, for so many steps.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> can_wait(lr_scheduler.StepLR(optimizer, 3))
    True
    >>> can_wait(lr_scheduler.LambdaLR(optimizer, lambda count: 0.9 ** count))
    False
    >>> can_wait(lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=2), 3)  # the third step is an error
    False
    """
    for part in _parts(schedule):
        if type(part) not in KINDS or "step" in vars(part) or "get_lr" in vars(part):
            return False
        if vars(part).get("_scale_fn_custom") is not None:
            return False
        if type(part) is lr_scheduler.OneCycleLR and part.last_epoch + steps > part.total_steps:
            return False
        for group in part.optimizer.param_groups:
            if not all(map(_is_rate, _written_values(group))):
                return False
    return True


def _written_values(group: dict[str, Any]) -> list[Any]:
    values = [group[key] for key in WRITTEN_KEYS if key in group]
    return [inner for item in values for inner in (item if type(item) is tuple else (item,))]


def _is_rate(value: Any) -> bool:
    """Whether a schedule may write it behind the graph: a number, or a tensor that it fills, which no derivative needs."""
    return type(value) in (int, float) or (type(value) is torch.Tensor and not value.requires_grad)


class Waiting:
    """The calls of schedules that wait for the end of one capture."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._values = interpreter.values
        self._journal = interpreter.effects
        interpreter.values.watch(self)
        interpreter.effects.defer(self._effects)
        self._calls: list[tuple[Source, Any]] = []
        self._objects: list[Any] = []
        self._containers: list[Any] = []
        #: Tensors that a schedule fills, and what reads each in the graph so far.
        self._filled: list[tuple[torch.Tensor, frozenset[torch.fx.Node]]] = []

    def add(self, source: Source, schedule: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call ``function(schedule, *args, **kwargs)`` when the graph has run."""
        self._calls.append((source, [function, [schedule, *args], dict(kwargs)]))
        for part in _parts(schedule):
            self._objects.append(part)
            self._containers += [vars(part), *part.optimizer.param_groups]
            rates = [item for group in part.optimizer.param_groups for item in _written_values(group)]
            self._filled += [(item, self._readers(item)) for item in rates if isinstance(item, torch.Tensor)]
            self._expect_change(part.optimizer)

    def _expect_change(self, optimizer: torch.optim.Optimizer) -> None:
        """A rate that a schedule writes after each call will change, although it may not have changed yet."""
        sources = [self._values.source_of(group) for group in optimizer.param_groups]
        names = {ItemSource(source, "lr").name for source in sources if source is not None}
        self._values.trace.findings.changing_numbers.update(names)

    def _readers(self, rate: torch.Tensor) -> frozenset[torch.fx.Node]:
        traced = self._values.trace.known(rate)
        found: set[torch.fx.Node] = set()
        stack = [] if traced is None else [traced.node]
        while stack:
            node = stack.pop()
            found.update(node.users)
            stack += [user for user in node.users if memory_of(user) == memory_of(node)]  # its views
        return frozenset(found)

    def steps_with(self, given: tuple[Any, ...]) -> float:
        """The most steps that a schedule makes in this call, with one more that is handed these arguments."""
        return math.inf if given else len(self._calls) + 1

    def was_written(self, schedule: Any) -> bool:
        """Whether the program itself has written to what a schedule reads or writes."""
        owners = [item for part in _parts(schedule) for item in (vars(part), *part.optimizer.param_groups)]
        return any(map(self._journal.written, owners))

    def check_read(self, source: Source) -> None:
        """Refuse to read what is not written yet."""
        if not self._calls:
            return
        hidden = {self._values.source_of(item) for item in self._objects}
        if isinstance(source, ItemSource) and source.key in WRITTEN_KEYS:
            raise _read_too_early(f"{source.name} is read after the step() of a schedule")
        at: Source | None = source
        while isinstance(at, Step):
            at = at.base
            if at in hidden:
                raise _read_too_early(f"{source.name} is read after the step() of a schedule")

    def check_native(self, value: Any) -> None:
        """Refuse to hand a schedule, or what it writes, to native code, which reads what it likes."""
        if self._calls and any(value is item for item in (*self._objects, *self._containers)):
            raise _read_too_early("native code gets a schedule after its step()")

    def _effects(self) -> list[Effect]:
        """The calls, in their order."""
        if self._calls and any(map(self._journal.written, self._containers)):
            raise _read_too_early("what a schedule has written is written again after its step()")
        if any(self._readers(rate) - before for rate, before in self._filled):
            raise _read_too_early("a rate is read after the step() of a schedule")
        return [Effect(source, "call", call) for source, call in self._calls]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, torch.Tensor)) or private_sizes.is_data_number(value)


def _register(function: types.FunctionType) -> None:
    @rule(function)
    def step(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values, schedule = interpreter.values, args[0] if args else None
        source = values.source_of(schedule)
        given = (*args[1:], *kwargs.values())
        if (
            source is None
            or not values.trace.settings.allows(AFTER_THE_GRAPH)
            or values.in_backward
            or getattr(type(schedule), "step", None) is not function
            or not all(map(_is_plain, given))
            or not can_wait(schedule, steps := interpreter.state(Waiting).steps_with(given))
            or interpreter.state(Waiting).was_written(schedule)
        ):
            if function is lr_scheduler.ReduceLROnPlateau.step and any(
                isinstance(item, torch.Tensor) for item in given
            ):
                raise Break(
                    "ReduceLROnPlateau decides from the value of a tensor",
                    "call its step() outside of the compiled function",
                )
            return interpreter.run_function(function, args, kwargs)
        values.guard(
            ComputedSource(can_wait, (source, steps), f"whether {source.name} writes numbers only"),
            Equals(True),
            "the step() of a schedule is called behind the graph",
        )
        interpreter.state(Waiting).add(source, schedule, function, args[1:], kwargs)
        return None


for _function in dict.fromkeys(kind.step for kind in KINDS):
    _register(_function)
