"""The guards of one capture while it runs; :meth:`GuardSet.freeze` turns them into plain data for a check.

>>> from dovetail.guards import ArgumentSource
>>> guards = GuardSet()
>>> guards.add(ArgumentSource(0, "L['n']"), Equals(3), None, "L['n'] was read")
>>> [str(guard) for guard in guards.freeze().guards]
["L['n'] is 3"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from dovetail.errors import InputError, UserLocation
from dovetail.guards.guard import FrozenGuards, Guard, SizeCheck, TensorInput, is_argument
from dovetail.guards.predicate import Equals, Predicate, SameObject
from dovetail.guards.reading import short
from dovetail.guards.source import Source
from dovetail.guards.tensor_predicate import Leafness, TensorFacts, TensorMatch
from dovetail.torch_private import guards as private_guards
from dovetail.torch_private import sizes as private_sizes


def _facts(tensor: torch.Tensor, fake: torch.Tensor | None) -> TensorFacts:
    facts = TensorFacts.of(tensor)
    if fake is None:
        return facts
    return replace(
        facts,
        shape=tuple(None if private_sizes.is_symbolic(size) else int(size) for size in fake.shape),
        stride=tuple(None if private_sizes.is_symbolic(step) else int(step) for step in fake.stride()),
    )


class GuardSet:
    """Collects the guards of one capture, each (source, predicate) once.

    It holds the tensors given to :meth:`add_tensor` until it is frozen, so that no other tensor gets their identities.
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
        """Whether the set takes no more guards."""
        return self._frozen is not None

    def set_shapes(self, shapes: SizeCheck | None) -> None:
        """Set the check of the assumptions about symbolic sizes, when no stage can make another one."""
        self._check_open()
        self._shapes = shapes

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

    def memory(self, index: int, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors whose memory an input stands for; a set that guards no tensors takes each for itself."""
        return self._inputs[index].source.memory(tensor) if index < len(self._inputs) else (tensor,)

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
        """Guard a tensor's metadata, without the sizes that are symbolic in ``fake``; returns its index among the inputs.

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
            self.add(source, SameObject((other,)), location, f"{source.name} and {other.name} are one tensor")
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
        """Set the user's line of an argument's guard to where the program first computed with it: its size is needed there.

        Tensors that were not reached from an argument keep theirs: they were read where they were needed.
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

    def about_data(self) -> Guard | None:
        """A guard that reads the numbers in an input tensor, which a graph on its own does not check."""
        marked = (
            item for item in self.so_far() if getattr(getattr(item.source, "function", None), "reads_data", False)
        )
        return next(marked, None)

    def add_leafness(self, index: int, location: UserLocation | None = None) -> None:
        """Guard whether the tensor is a leaf (done unasked for tensors that are none)."""
        item = self._inputs[index]
        self.add(item.source, Leafness(item.facts.is_leaf), location, f"whether {item.source.name} is a leaf matters")

    def add_separate_memory(self, index: int) -> None:
        """Guard that no other tensor input shares the memory of this one (for an input that is written to)."""
        self._check_open()
        self._separate[index] = None

    def add_backward_read(self, guard: Guard) -> None:
        """Have a guard checked again when the backward runs, because a hook or a custom backward has read the value."""
        self._check_open()
        self._backward.setdefault((guard.source, guard.predicate), guard)

    def set_call_shape(self, positional: int, keywords: Iterable[str]) -> None:
        """Set the number of positional arguments of the call and the names of its keyword arguments, in order."""
        self._check_open()
        self._call_shape = (positional, tuple(keywords))

    def freeze(self) -> FrozenGuards:
        """The guards as data, made outside of the trace. The set then lets go of its tensors and takes no more guards."""
        if self._frozen is None:
            positional, keywords = self._call_shape or (None, None)
            bulk = argument_bulk = None
            # A tensor that has changed since (in an eager run) is checked fact by fact.
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

    def _check_open(self) -> None:
        if self._frozen is not None:
            raise RuntimeError("this guard set is frozen")
