"""Guards: what must hold at a call for an entry to be used, with the user's line that needed it.

A :class:`GuardSet` collects guards while a capture runs; :meth:`GuardSet.freeze` turns them into plain data for
:func:`dovetail.guards.compile_checker`.

>>> guards = GuardSet()
>>> guards.add(ArgumentSource(0, "L['n']"), Equals(3), None, "L['n'] was read")
>>> [str(guard) for guard in guards.freeze().guards]
["L['n'] is 3"]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from dovetail.errors import InputError, UserLocation
from dovetail.guards.predicate import (
    Distinct,
    Equals,
    Leafness,
    Predicate,
    SameObject,
    StorageOffset,
    TensorFacts,
    TensorMatch,
    Unbound,
    short,
)
from dovetail.guards.source import FETCH_ERRORS, ArgumentSource, CellSource, GradSource, KeywordSource, Source
from dovetail.torch_private import guards as private_guards
from dovetail.torch_private import sizes as private_sizes

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
    """One tensor input: where it is found and what it was like."""

    source: Source
    facts: TensorFacts
    location: UserLocation | None = None


def _facts(tensor: torch.Tensor, fake: torch.Tensor | None) -> TensorFacts:
    facts = TensorFacts.of(tensor)
    if fake is None:
        return facts
    return replace(
        facts,
        shape=tuple(None if private_sizes.is_symbolic(size) else int(size) for size in fake.shape),
        stride=tuple(None if private_sizes.is_symbolic(step) else int(step) for step in fake.stride()),
    )


def root_of(source: Source) -> Source:
    """The root that a source starts from."""
    while (parent := source.parent) is not None:
        source = parent
    return source


def is_argument(source: Source) -> bool:
    """Whether a source starts from an argument of the call."""
    return isinstance(root_of(source), (ArgumentSource, KeywordSource))


class SizeCheck(Protocol):
    """What the guards need of a check of symbolic sizes; see :class:`dovetail.trace.ShapeGuards`."""

    @property
    def holds(self) -> Callable[[Sequence[torch.Tensor]], bool]:
        """Whether the sizes of the fetched tensors are allowed."""

    def failures(self, tensors: Sequence[torch.Tensor]) -> list[tuple[str, UserLocation | None]]:
        """What does not hold."""


@dataclass(frozen=True)
class FrozenGuards:
    """All guards of one entry as data; it keeps no tensor alive.

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

    def __str__(self) -> str:
        return "\n".join(f"{guard}  # {guard.location or guard.reason}" for guard in self.guards)


class GuardSet:
    """Collects the guards of one capture, each (source, predicate) once.

    It holds the tensors given to :meth:`add_tensor` until it is frozen, so that their identities stay their own.
    """

    def __init__(self) -> None:
        self._guards: dict[tuple[Source, Predicate], Guard] = {}
        self._constants: dict[Source, Equals] = {}
        self._tensors: list[torch.Tensor] = []
        self._inputs: list[TensorInput] = []
        self._index_of: dict[int, int] = {}
        self._index_by_source: dict[Source, int] = {}
        self._call_shape: tuple[int, tuple[str, ...]] | None = None
        self._separate: dict[int, None] = {}
        self._frozen: FrozenGuards | None = None
        self._shapes: SizeCheck | None = None
        self._backward: dict[tuple[Source, Predicate], Guard] = {}

    @property
    def is_frozen(self) -> bool:
        """Whether the guards are data already."""
        return self._frozen is not None

    def set_shapes(self, shapes: SizeCheck | None) -> None:
        """Give the check of what was assumed about symbolic sizes, when no stage can assume more."""
        self._check_open()
        self._shapes = shapes

    def tensor_sources(self) -> list[Source]:
        """The sources of all tensor inputs, in index order."""
        return [item.source for item in self._inputs]

    def _bulk(self, indices: Iterable[int]) -> Callable[..., bool]:
        chosen = list(indices)
        facts = [self._inputs[index].facts for index in chosen]
        return private_guards.bulk_tensor_check(
            [self._tensors[index] for index in chosen],
            [list(item.shape) for item in facts],
            [list(item.stride) for item in facts],
        )

    def __len__(self) -> int:
        return len(self._guards)

    def so_far(self) -> tuple[Guard, ...]:
        """The guards that were added until now."""
        return tuple(self._guards.values())

    def add(self, source: Source, predicate: Predicate, location: UserLocation | None = None, reason: str = "") -> None:
        """Add a guard, once; ValueError if the source was already guarded to equal something else."""
        self._check_open()
        if (source, predicate) in self._guards:
            return
        if isinstance(predicate, Equals):
            known = self._constants.setdefault(source, predicate)
            if known != predicate:
                raise ValueError(
                    f"{source.name} cannot be both {short(known.value)} and {short(predicate.value)} in one capture"
                )
        self._guards[source, predicate] = Guard(source, predicate, location, reason)

    def add_tensor(
        self,
        source: Source,
        tensor: torch.Tensor,
        location: UserLocation | None = None,
        fake: torch.Tensor | None = None,
    ) -> int:
        """Guard a tensor's metadata; returns its index among the inputs. What is symbolic in ``fake`` is left out.

        The same tensor by a second source returns the first index, with a guard that both stay one object.
        """
        self._check_open()
        known = self._index_by_source.get(source)
        if known is not None:
            if self._tensors[known] is not tensor:
                raise ValueError(f"{source.name} gave two tensors in one capture")
            return known
        first = self._index_of.get(id(tensor))
        if first is not None:
            other = self._inputs[first].source
            self.add(source, SameObject(other), location, f"{source.name} and {other.name} are one tensor")
            self._index_by_source[source] = first
            return first
        if tensor.layout is not torch.strided:
            raise InputError(
                f"{source.name} has the layout {tensor.layout}", where=location, advice="use a dense tensor"
            )
        index = len(self._tensors)
        self._tensors.append(tensor)
        self._inputs.append(TensorInput(source, _facts(tensor, fake), location))
        self._index_of[id(tensor)] = index
        self._index_by_source[source] = index
        self.add(source, TensorMatch(index), location, f"{source.name} was read")
        if not tensor.is_leaf:
            # Eager refuses an in-place write on a leaf that the capture of a non-leaf allows.
            self.add_leafness(index, location)
        return index

    def note_use(self, index: int, location: UserLocation) -> None:
        """Say where the program first computed with a tensor: that an argument has this size is needed there.

        Nothing happens to tensors that were not reached from an argument: they were read where they were needed.
        """
        self._check_open()
        item = self._inputs[index]
        key = (item.source, TensorMatch(index))
        if is_argument(item.source) and key in self._guards:
            self._guards[key] = replace(self._guards[key], location=location)
            self._inputs[index] = replace(item, location=location)

    def tensor_source(self, index: int) -> Source:
        """The source by which tensor input ``index`` was first reached."""
        return self._inputs[index].source

    def add_no_gradient(self, index: int, location: UserLocation | None = None) -> None:
        """Guard that the tensor's ``.grad`` is None."""
        source = self.tensor_source(index)
        self.add(GradSource(source), Equals(None), location, f"{source.name}.grad was read")

    def add_leafness(self, index: int, location: UserLocation | None = None) -> None:
        """Guard whether the tensor is a leaf (done unasked for tensors that are none)."""
        item = self._inputs[index]
        self.add(item.source, Leafness(item.facts.is_leaf), location, f"whether {item.source.name} is a leaf matters")

    def add_storage_offset(self, index: int, location: UserLocation | None = None) -> None:
        """Guard where in its storage the tensor starts."""
        source = self.tensor_source(index)
        offset = int(self._tensors[index].storage_offset())
        self.add(source, StorageOffset(offset), location, f"{source.name}.storage_offset() was read")

    def add_separate_memory(self, index: int) -> None:
        """Guard that no other tensor input shares the memory of this one (for an input that is written to)."""
        self._check_open()
        self._separate[index] = None

    def add_backward_read(self, guard: Guard) -> None:
        """Note what a hook or a custom backward has read: it must hold when the backward runs, too."""
        self._check_open()
        self._backward.setdefault((guard.source, guard.predicate), guard)

    def set_call_shape(self, positional: int, keywords: Iterable[str]) -> None:
        """Say how many positional arguments the call has and the names of its keyword arguments, in order.

        Without it, both are taken from the sources that were guarded.
        """
        self._check_open()
        self._call_shape = (positional, tuple(keywords))

    def freeze(self) -> FrozenGuards:
        """The guards as data. Call it outside of the trace.

        The set then lets go of its tensors and takes no more guards.
        """
        if self._frozen is None:
            positional, keywords = self._call_shape or self._inferred_call_shape()
            bulk = argument_bulk = None
            # A tensor that is another way by now (an eager run changed it) is checked fact by fact.
            unchanged = all(
                tensor.layout is torch.strided and item.facts.hold(tensor)
                for item, tensor in zip(self._inputs, self._tensors, strict=True)
            )
            if self._tensors and unchanged:
                bulk = self._bulk(range(len(self._tensors)))
                arguments = [i for i, item in enumerate(self._inputs) if is_argument(item.source)]
                if arguments and len(arguments) < len(self._tensors):
                    argument_bulk = self._bulk(arguments)
            self._frozen = FrozenGuards(
                tuple(self._guards.values()),
                tuple(self._inputs),
                positional,
                keywords,
                bulk,
                argument_bulk,
                tuple(self._separate),
                self._shapes,
                tuple(self._backward.values()),
            )
            self._tensors.clear()
            self._index_of.clear()
        return self._frozen

    def _inferred_call_shape(self) -> tuple[int, tuple[str, ...]]:
        positional = 0
        keywords: dict[str, None] = {}
        for guard in self._guards.values():
            root = root_of(guard.source)
            if isinstance(root, ArgumentSource):
                positional = max(positional, root.index + 1)
            elif isinstance(root, KeywordSource):
                keywords[root.keyword] = None
        return positional, tuple(keywords)

    def _check_open(self) -> None:
        if self._frozen is not None:
            raise RuntimeError("this guard set is frozen")


@dataclass(frozen=True)
class GuardFailure:
    """One reason why an entry could not be used; ``guard`` is None for the call's shape and torch's state."""

    sentence: str
    guard: Guard | None = None
    needed_at: UserLocation | None = None

    @property
    def location(self) -> UserLocation | None:
        """The user's line that needed what failed."""
        return self.guard.location if self.guard is not None else self.needed_at

    def __str__(self) -> str:
        # L['x'] and G['x'] are how sources are written; the user's own name for it is x.
        sentence = _LOCAL_OR_GLOBAL.sub(r"\1", self.sentence)
        return f"{sentence}; needed at {self.location}" if self.location is not None else sentence


def are_decided_by(failures: Sequence[GuardFailure], names: Collection[str]) -> bool:
    """Whether something that was read from what has one of these names has failed, and beside it no size or number: which
    gradients are on at a point depends on the way to it.
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


def check_guard(
    guard: Guard,
    tensors: tuple[TensorInput, ...],
    callee: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[GuardFailure]:
    """The slow way to check one guard: the reasons why it fails, none if it holds."""
    source, predicate = guard.source, guard.predicate
    name = source.name
    try:
        if isinstance(predicate, Unbound) and isinstance(source, CellSource):
            value: Any = source.cell(source.base.fetch(callee, args, kwargs))
        else:
            value = source.fetch(callee, args, kwargs)
        if isinstance(predicate, SameObject):
            holds = value is predicate.other.fetch(callee, args, kwargs)
        elif isinstance(predicate, Distinct):
            values = [value, *(other.fetch(callee, args, kwargs) for other in predicate.others)]
            holds = len({*map(id, values)}) == len(values)
        elif isinstance(predicate, TensorMatch):
            sentences = tensors[predicate.index].facts.differences(name, value)
            return [GuardFailure(sentence, guard) for sentence in sentences]
        else:
            holds = predicate.holds(value)
        return [] if holds else [GuardFailure(predicate.failure(name, value), guard)]
    except FETCH_ERRORS as error:
        return [GuardFailure(f"`{name}` cannot be read any more ({type(error).__name__}: {error})", guard)]
