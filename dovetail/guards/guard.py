"""Guards as data: a predicate on the value at a source, with the user's line and the decision that needed it.

>>> from dovetail.guards import Equals
>>> guard = Guard(ArgumentSource(0, "L['n']"), Equals(3), None, "L['n'] was read")
>>> str(guard)
"L['n'] is 3"
>>> failures_of(guard, Call(None, (4,), {}, ()))[0].sentence
"`L['n']` was 3, is 4"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dovetail.errors import UserLocation
from dovetail.guards.predicate import Call, Identity, Predicate
from dovetail.guards.source import FETCH_ERRORS, ArgumentSource, KeywordSource, Source
from dovetail.guards.tensor_predicate import Leafness, TensorFacts, TensorMatch

_LOCAL_OR_GLOBAL = re.compile(r"(?<![\w.\]])[LG]\['([^\W\d]\w*)'\]")


@dataclass(frozen=True)
class Guard:
    """A predicate on the value at a source, with the user's line and the decision that needed it."""

    source: Source
    predicate: Predicate
    location: UserLocation | None = None
    reason: str = ""

    def __str__(self) -> str:
        return self.predicate.describe(self.source.name)


@dataclass(frozen=True)
class TensorInput:
    """One tensor input: its source, and the facts of the tensor at capture."""

    source: Source
    facts: TensorFacts
    location: UserLocation | None = None


class SizeCheck(Protocol):
    """The check of symbolic sizes, as far as guards need it; see :class:`dovetail.trace.ShapeGuards`."""

    @property
    def holds(self) -> Callable[[Sequence[torch.Tensor]], bool]:
        """Whether the sizes of the fetched tensors are allowed."""

    def failures(self, tensors: Sequence[torch.Tensor]) -> list[tuple[str, UserLocation | None]]:
        """Sentences on the conditions that do not hold."""


@dataclass(frozen=True)
class FrozenGuards:
    """All guards of one entry as data; it keeps no tensor and no module alive.

    ``bulk`` checks all tensors, ``argument_bulk`` those reached from arguments alone; None where there are none.
    ``separate`` holds indices of inputs whose memory no other input may share. ``shapes`` checks symbolic sizes.
    ``backward`` are those guards that hooks and custom backwards need: eager would read these values when the backward runs.
    """

    guards: tuple[Guard, ...]
    tensors: tuple[TensorInput, ...]
    positional: int | None = None
    keywords: tuple[str, ...] | None = None
    bulk: Callable[..., bool] | None = field(default=None, compare=False, repr=False)
    argument_bulk: Callable[..., bool] | None = field(default=None, compare=False, repr=False)
    separate: tuple[int, ...] = ()
    shapes: SizeCheck | None = field(default=None, compare=False, repr=False)
    backward: tuple[Guard, ...] = ()

    @property
    def is_dead(self) -> bool:
        """Whether the guards can never hold again: an object that one of them wants to see has gone away."""
        return any(isinstance(guard.predicate, Identity) and guard.predicate.is_dead for guard in self.guards)

    def __str__(self) -> str:
        return "\n".join(f"{guard}  # {guard.location or guard.reason}" for guard in self.guards)


@dataclass(frozen=True)
class GuardFailure:
    """One reason why an entry could not be used; ``guard`` is None for the call's shape and torch's state."""

    sentence: str
    guard: Guard | None = None
    needed_at: UserLocation | None = None

    @property
    def location(self) -> UserLocation | None:
        """The user's line that needed the value that changed."""
        return self.guard.location if self.guard is not None else self.needed_at

    def __str__(self) -> str:
        # L['x'] and G['x'] are how sources are written; the user's own name for it is x.
        sentence = _LOCAL_OR_GLOBAL.sub(r"\1", self.sentence)
        return f"{sentence}; needed at {self.location}" if self.location is not None else sentence


def root_of(source: Source) -> Source:
    """The root that a source starts from."""
    while (parent := source.parent) is not None:
        source = parent
    return source


def is_argument(source: Source) -> bool:
    """Whether a source starts from an argument of the call."""
    return isinstance(root_of(source), (ArgumentSource, KeywordSource))


def failures_of(guard: Guard, call: Call) -> list[GuardFailure]:
    """Check one guard slowly: the reasons why it fails, none if it holds."""
    try:
        return [GuardFailure(sentence, guard) for sentence in guard.predicate.failures(guard.source, call)]
    except FETCH_ERRORS as error:
        name = guard.source.name
        return [GuardFailure(f"`{name}` cannot be read any more ({type(error).__name__}: {error})", guard)]


def are_decided_by(failures: Sequence[GuardFailure], names: Collection[str]) -> bool:
    """Whether a value reached from a root with one of these names has failed, and beside it no size or number: which gradients are
    on at a point depends on the way to it.
    """
    decided = [
        failure.guard is not None and root_of(failure.guard.source).name in names
        for failure in failures
        if failure.guard is None or not _is_of_gradients(failure.guard, failure.sentence)
    ]
    return bool(decided) and all(decided)


def _is_of_gradients(guard: Guard, sentence: str) -> bool:
    is_flag = isinstance(guard.predicate, TensorMatch) and ".requires_grad` was" in sentence
    return is_flag or isinstance(guard.predicate, Leafness)
