"""The recordings of one piece: each in a slot that knows for which inputs it may be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.backends.common.memory import span, storage_address
from dovetail.backends.cudagraphs.recorder import Recording
from dovetail.backends.cudagraphs.results import Results
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


@dataclass(frozen=True)
class Reads:
    """The inputs of a call by what its key holds of them: addresses (``fixed``), sizes and strides, or the value."""

    copied: frozenset[int]
    fixed: list[int]
    sized: list[int]
    others: list[int]

    @classmethod
    def of(cls, spec: PieceSpec, inputs: Sequence[Any], copied: frozenset[int]) -> Reads:
        """Sort the inputs. The guards of the entry have compared the sizes of those that are ``pinned``."""
        tensors = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        known = {*tensors, *spec.numbers}
        return cls(
            copied,
            fixed=[index for index in tensors if index not in copied],
            sized=[index for index in tensors if index not in spec.pinned or index in copied],
            others=[index for index in range(len(inputs)) if index not in known],
        )


@dataclass
class Buffer:
    """Memory at a fixed address (``row``, seen as ``value``) into which the memory of one input is copied."""

    index: int
    row: torch.Tensor
    value: torch.Tensor

    @classmethod
    def like(cls, index: int, value: torch.Tensor, device: torch.device) -> Buffer:
        """Allocate a buffer for an input, always on the device.

        Attention's seed lies on the host unless its forward was recorded, and a recording reads the host only once.
        """
        row = torch.empty(span(value), dtype=value.dtype, device=device)
        return cls(index, row, row.as_strided(value.shape, value.stride(), 0).detach())

    def fill(self, value: torch.Tensor) -> None:
        """Copy the input in."""
        self.row.copy_(value.as_strided(self.row.shape, (1,)))

    def write_back(self, value: torch.Tensor) -> None:
        """Copy the new value of a written input out."""
        value.as_strided(self.row.shape, (1,)).copy_(self.row)


@dataclass
class Shape:
    """Calls with equal sizes: their common buffers, and the recordings by the addresses of inputs that are not copied."""

    buffers: list[Buffer] = field(default_factory=list)
    numbers: dict[int, torch.Tensor] = field(default_factory=dict)
    slots: dict[Key, list[Slot]] = field(default_factory=dict)


@dataclass(eq=False)
class Slot:
    """A recording with the inputs that it is for.

    ``kept``: addresses of its own memory that is handed out in place; ``static``: addresses of parameters and buffers that it
    reads; ``relied``: addresses of other inputs that it reads in place, where other recordings keep or rely on them;
    ``written``: addresses of inputs that it writes to.
    """

    recording: Recording
    results: Results
    shape: Shape
    reads: Reads
    key: tuple[Key, Key]
    kept: tuple[int, ...]
    static: tuple[int, ...]
    relied: tuple[int, ...]
    written: frozenset[int]

    def is_free(self, inputs: Sequence[Any]) -> bool:
        """Return whether a call with these inputs, which have the slot's key, may replay the recording."""
        written = self.written
        return (
            (not written or all(storage_address(inputs[index]) not in written for index in self.reads.copied))
            and not self.recording.is_released
            and not self.results.in_use()
        )
