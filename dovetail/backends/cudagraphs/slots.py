"""The recordings of one piece: each in a slot that knows for which inputs it may be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.backends.common.outputs import storage_address
from dovetail.backends.cudagraphs.recorder import Recording
from dovetail.backends.cudagraphs.results import Results, flat, is_dense, span
from dovetail.backends.cudagraphs.shared import Addresses
from dovetail.backends.protocol import Kind

Key = tuple[Any, ...]


@dataclass(frozen=True)
class PieceSpec:
    """Facts about a piece before it runs; all sets hold indices of inputs, ``visible`` those of outputs.

    ``keeps``: whether there are outputs besides the visible ones, which are handed out in place.
    ``static``: inputs that are likely to stay at one address; ``pinned``: those of them whose sizes cannot change either.
    """

    kind: Kind
    device: torch.device
    names: tuple[str, ...]
    static: frozenset[int]
    pinned: frozenset[int]
    numbers: frozenset[int]
    mutated: frozenset[int]
    visible: frozenset[int]
    keeps: bool = False


@dataclass
class Buffer:
    """Memory at a fixed address into which one input is copied before each replay."""

    index: int
    value: torch.Tensor
    #: The memory as one row, for an input with gaps or overlaps: overlapping elements cannot be written one by one.
    row: torch.Tensor | None

    @classmethod
    def like(cls, index: int, value: torch.Tensor, device: torch.device) -> Buffer:
        """Allocate a buffer for an input, always on the device.

        Attention's seed lies on the host unless its forward was recorded, and a recording reads the host only once.
        """
        made = torch.empty(span(value), dtype=value.dtype, device=device)
        strided = made.as_strided(value.shape, value.stride(), 0).detach()
        return cls(index, strided, None if is_dense(value) else made)

    def fill(self, value: torch.Tensor) -> None:
        """Copy the input in."""
        if self.row is None:
            self.value.copy_(value)
        else:
            self.row.copy_(flat(value))

    def write_back(self, value: torch.Tensor) -> None:
        """Copy the new value of a written input out."""
        if self.row is None:
            value.copy_(self.value)
        else:
            flat(value).copy_(self.row)


@dataclass
class Shape:
    """Calls with equal sizes: their common buffers, and the recordings by the addresses of inputs that are not copied."""

    buffers: list[Buffer] = field(default_factory=list)
    numbers: dict[int, torch.Tensor] = field(default_factory=dict)
    slots: dict[Key, list[Slot]] = field(default_factory=dict)

    def all_slots(self) -> list[Slot]:
        """Return the slots of all addresses."""
        return [slot for slots in self.slots.values() for slot in slots]


@dataclass(eq=False)
class Slot:
    """A recording with the inputs that it is for; ``others`` are neither tensors nor numbers that may change."""

    recording: Recording
    results: Results
    addresses: Addresses
    shape: Shape
    copied: frozenset[int]
    pointers: list[int]
    fixed: list[int]
    sized: list[int]
    sizes: list[Any]
    others: list[tuple[int, Any]]
    written: frozenset[int]
    #: Addresses of inputs that other recordings keep, or rely on, and that are read in place.
    relied: tuple[int, ...]

    @classmethod
    def of(
        cls,
        made: tuple[Recording, Results, Addresses],
        shape: Shape,
        copied: frozenset[int],
        inputs: Sequence[Any],
        spec: PieceSpec,
    ) -> Slot:
        """Make the slot of a new recording from the inputs of its call."""
        tensors = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        fixed = [index for index in tensors if index not in copied]
        sized = [index for index in tensors if index not in spec.pinned or index in copied]
        known = {*tensors, *spec.numbers}
        return cls(
            *made,
            shape,
            copied,
            pointers=[inputs[index].data_ptr() for index in fixed],
            fixed=fixed,
            sized=sized,
            sizes=[(inputs[index].shape, inputs[index].stride()) for index in sized],
            others=[(index, value) for index, value in enumerate(inputs) if index not in known],
            written=frozenset(storage_address(inputs[index]) for index in spec.mutated),
            relied=tuple(storage_address(inputs[index]) for index in fixed if index not in spec.static | spec.numbers),
        )

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Return whether a call with these inputs may replay this recording. An unneeded copy does no harm."""
        return (
            [inputs[index].data_ptr() for index in self.fixed] == self.pointers
            and [(inputs[index].shape, inputs[index].stride()) for index in self.sized] == self.sizes
            and all(inputs[index] is value for index, value in self.others)
            and (not self.written or all(storage_address(inputs[index]) not in self.written for index in self.copied))
            and not self.recording.is_released
            and not self.results.in_use()
        )
