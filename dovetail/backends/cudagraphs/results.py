"""Outputs of a recording, handed out so that the next replay cannot change what the caller keeps.

Tensors that the user gets are copied out of the recording's memory. Tensors that only the runtime sees (saved for the
backward) are handed out in place, and the recording is not replayed until the last reference to them is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.backends.common.outputs import storage_address
from dovetail.torch_private import tensors as private_tensors

#: A tensor of the recording with the indices of the outputs that it is.
Output = tuple[tuple[int, ...], torch.Tensor]


def is_dense(value: torch.Tensor) -> bool:
    """Return whether the tensor's elements fill a stretch of memory without gaps and overlaps."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(value.shape, value.stride(), strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def span(value: torch.Tensor) -> int:
    """Return how many elements of memory lie between the tensor's first and its last, both included."""
    if value.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))


def flat(value: torch.Tensor) -> torch.Tensor:
    """Return all memory between the tensor's first and its last element, as one row."""
    return value.as_strided((span(value),), (1,), value.storage_offset())


class Results:
    """Hands out the outputs of one recording; made once, when the recording is.

    ``given``: the tensors that were recorded with, one for each input; ``visible``: outputs that the user may keep.
    """

    def __init__(self, outputs: Sequence[Any], given: Sequence[Any], visible: frozenset[int]) -> None:
        self._outputs: list[Any] = [None if isinstance(value, torch.Tensor) else value for value in outputs]
        #: Outputs that are inputs, and views of inputs: output, input, shape, strides, distance of the first elements.
        self._inputs: list[tuple[int, int]] = []
        self._views: list[tuple[int, int, tuple[int, ...], tuple[int, ...], int]] = []
        #: Dense tensors copied together, and stretches of memory copied whole, with the tensors that lie there.
        self._dense: list[Output] = []
        self._rows: list[tuple[torch.Tensor, list[Output]]] = []
        #: Tensors handed out in place.
        self._kept: list[Output] = []
        identities = {id(value): index for index, value in enumerate(given) if isinstance(value, torch.Tensor)}
        owners: dict[int, int] = {}
        for index, value in enumerate(given):
            if isinstance(value, torch.Tensor) and storage_address(value):
                owners.setdefault(storage_address(value), index)
        groups: dict[int, dict[int, torch.Tensor]] = {}
        places: dict[int, list[int]] = {}
        for index, value in enumerate(outputs):
            if not isinstance(value, torch.Tensor):
                continue
            source = owners.get(storage_address(value))
            if id(value) in identities:
                self._inputs.append((index, identities[id(value)]))
            elif source is None:
                # Tensors without memory share the address 0 with nobody.
                groups.setdefault(storage_address(value) or -1 - id(value), {})[id(value)] = value
                places.setdefault(id(value), []).append(index)
            elif given[source].dtype == value.dtype:
                delta = value.storage_offset() - given[source].storage_offset()
                self._views.append((index, source, tuple(value.shape), tuple(value.stride()), delta))
            else:
                # An input seen as another dtype is copied: the next call's inputs will lie there.
                self._add([((index,), value)], frozenset({index}))
        for members in groups.values():
            self._add([(tuple(places[key]), tensor) for key, tensor in members.items()], visible)
        self._sources = [tensor for _, tensor in self._dense]
        self._templates = [(item.shape, item.stride(), item.dtype, item.device) for item in self._sources]
        # One tensor for each piece of memory.
        own = {storage_address(tensor): tensor for _, tensor in self._kept}.values()
        self._users = [(tensor, private_tensors.storage_references(tensor)) for tensor in own]

    def _add(self, members: list[Output], visible: frozenset[int]) -> None:
        """Sort in tensors that share one piece of memory."""
        tensors = [tensor for _, tensor in members]
        if visible.isdisjoint(index for indices, _ in members for index in indices):
            self._kept += members
        elif len(members) > 1 and any(tensor.dtype != tensors[0].dtype or tensor.numel() == 0 for tensor in tensors):
            for member in members:
                self._add([member], visible.union(member[0]))
        elif len(members) == 1 and is_dense(tensors[0]) and not tensors[0].is_conj() and not tensors[0].is_neg():
            self._dense += members
        else:
            start = min(tensor.storage_offset() for tensor in tensors)
            end = max(tensor.storage_offset() + span(tensor) for tensor in tensors)
            self._rows.append((tensors[0].as_strided((end - start,), (1,), start), members))

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of memory that is handed out in place."""
        return tuple(storage_address(tensor) for _, tensor in self._kept)

    def in_use(self) -> bool:
        """Return whether Python or autograd still refers to a tensor that was handed out in place."""
        return any(private_tensors.storage_references(tensor) > users for tensor, users in self._users)

    def hand_out(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of the replay that has just run, for the caller's ``inputs``."""
        outputs = list(self._outputs)
        for index, source in self._inputs:
            outputs[index] = inputs[source]
        for index, source, shape, strides, delta in self._views:
            owner = inputs[source]
            outputs[index] = owner.as_strided(shape, strides, owner.storage_offset() + delta).detach()
        handed = [(indices, tensor.detach()) for indices, tensor in self._kept]
        copies = _copies(self._sources, self._templates)
        handed += [(indices, copied) for (indices, _), copied in zip(self._dense, copies, strict=True)]
        for row, members in self._rows:
            copied, start = row.clone(), row.storage_offset()
            for indices, tensor in members:
                offset = tensor.storage_offset() - start
                handed.append((indices, copied.as_strided(tensor.shape, tensor.stride(), offset).detach()))
        for indices, tensor in handed:
            for index in indices:
                outputs[index] = tensor
        return outputs


def _copies(sources: list[torch.Tensor], templates: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Copy dense tensors with few kernels."""
    made = [torch.empty_strided(shape, steps, dtype=dtype, device=device) for shape, steps, dtype, device in templates]
    if made:
        torch.ops.aten._foreach_copy_.default(made, sources)
    return made
