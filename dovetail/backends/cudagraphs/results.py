"""Handing out what a recording has computed, so that the next replay cannot change what the caller keeps.

Tensors that the user gets are copied out of the recording's memory. Tensors that only the runtime sees (saved for the
backward) are handed out where they lie, and the recording is not replayed until the last reference to them is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.backends.common.outputs import storage_address
from dovetail.torch_private import tensors as private_tensors

Handout = Callable[[list[Any]], Any]


def is_dense(value: torch.Tensor) -> bool:
    """Whether the tensor's elements fill a stretch of memory without gaps and overlaps."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(value.shape, value.stride(), strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def span(value: torch.Tensor) -> int:
    """How many elements of memory lie between the tensor's first and its last, both included."""
    if value.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))


def flat(value: torch.Tensor) -> torch.Tensor:
    """All memory between the tensor's first and its last element, as one row."""
    return value.as_strided((span(value),), (1,), value.storage_offset())


class Results:
    """How each output of one recording is handed out; made once, when the recording is.

    ``given``: the tensors that were recorded with, one for each input; ``visible``: outputs that the user may keep.
    """

    def __init__(self, outputs: Sequence[Any], given: Sequence[Any], visible: frozenset[int]) -> None:
        self._plain: list[tuple[int, Any]] = []
        self._inputs: list[tuple[int, int]] = []
        self._views: list[tuple[int, int, tuple[int, ...], tuple[int, ...], int]] = []
        self._copies: list[tuple[tuple[int, ...], torch.Tensor]] = []
        self._dense: list[tuple[tuple[int, ...], torch.Tensor]] = []
        self._rows: list[tuple[torch.Tensor, list[tuple[int, torch.Tensor, int]]]] = []
        self._kept: list[tuple[tuple[int, ...], torch.Tensor]] = []
        self._count = len(outputs)
        owners: dict[int, int] = {}
        identities = {id(value): index for index, value in enumerate(given) if isinstance(value, torch.Tensor)}
        for index, value in enumerate(given):
            if isinstance(value, torch.Tensor) and storage_address(value):
                owners.setdefault(storage_address(value), index)
        groups: dict[int, dict[int, tuple[torch.Tensor, list[int]]]] = {}
        for index, value in enumerate(outputs):
            if not isinstance(value, torch.Tensor):
                self._plain.append((index, value))
            elif id(value) in identities:
                self._inputs.append((index, identities[id(value)]))
            elif storage_address(value) in owners and given[owners[storage_address(value)]].dtype == value.dtype:
                source = owners[storage_address(value)]
                delta = value.storage_offset() - given[source].storage_offset()
                self._views.append((index, source, tuple(value.shape), tuple(value.stride()), delta))
            else:
                address = storage_address(value)
                if address in owners:
                    # An input seen as another dtype: the next call's inputs will lie there.
                    self._add_copies([(value, [index])])
                    continue
                # Tensors without memory share the address 0 with nobody.
                group = groups.setdefault(address or -1 - id(value), {})
                group.setdefault(id(value), (value, []))[1].append(index)
        for members in groups.values():
            self._add(list(members.values()), visible)
        self._templates = [
            (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device) for _, tensor in self._dense
        ]
        self._sources = [tensor for _, tensor in self._dense]
        # One tensor for each piece of memory.
        own = list({storage_address(tensor): tensor for _, tensor in self._kept}.values())
        self._users = [(tensor, private_tensors.storage_references(tensor)) for tensor in own]

    def _add(self, members: list[tuple[torch.Tensor, list[int]]], visible: frozenset[int]) -> None:
        indices = [index for _, places in members for index in places]
        tensors = [tensor for tensor, _ in members]
        if not visible.intersection(indices):
            self._kept.extend((tuple(places), tensor) for tensor, places in members)
        elif len(members) == 1 or any(tensor.dtype != tensors[0].dtype or tensor.numel() == 0 for tensor in tensors):
            self._add_copies(members)
        else:
            start = min(tensor.storage_offset() for tensor in tensors)
            end = max(tensor.storage_offset() + span(tensor) for tensor in tensors)
            row = tensors[0].as_strided((end - start,), (1,), start)
            entries = [(index, tensor, int(tensor.storage_offset() - start)) for tensor, at in members for index in at]
            self._rows.append((row, entries))

    def _add_copies(self, members: list[tuple[torch.Tensor, list[int]]]) -> None:
        for tensor, places in members:
            dense = is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg()
            (self._dense if dense else self._copies).append((tuple(places), tensor))

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the memory of what is handed out in place lies."""
        return tuple(storage_address(tensor) for _, tensor in self._kept)

    def in_use(self) -> bool:
        """Whether something that was handed out in place is still referred to, in Python or by autograd."""
        return any(private_tensors.storage_references(tensor) > users for tensor, users in self._users)

    def hand_out(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of the replay that has just run, for the caller's ``inputs``."""
        outputs: list[Any] = [None] * self._count
        for index, value in self._plain:
            outputs[index] = value
        for index, source in self._inputs:
            outputs[index] = inputs[source]
        for index, source, shape, strides, delta in self._views:
            owner = inputs[source]
            outputs[index] = owner.as_strided(shape, strides, owner.storage_offset() + delta).detach()
        for places, tensor in self._kept:
            alias = tensor.detach()
            for index in places:
                outputs[index] = alias
        for (places, _), copied in zip(self._dense, _copies(self._sources, self._templates), strict=True):
            for index in places:
                outputs[index] = copied
        for places, tensor in self._copies:
            copied = _copy(tensor)
            for index in places:
                outputs[index] = copied
        for row, entries in self._rows:
            copied = row.clone()
            made: dict[int, torch.Tensor] = {}
            for index, tensor, offset in entries:
                if id(tensor) not in made:
                    made[id(tensor)] = copied.as_strided(tensor.shape, tensor.stride(), offset).detach()
                outputs[index] = made[id(tensor)]
        return outputs


def _copies(sources: list[torch.Tensor], templates: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Copies of dense tensors, made by few kernels."""
    made = [
        torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype, device in templates
    ]
    if made:
        torch.ops.aten._foreach_copy_.default(made, sources)
    return made


def _copy(value: torch.Tensor) -> torch.Tensor:
    if is_dense(value) or value.numel() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return flat(value).clone().as_strided(value.shape, value.stride(), 0).detach()
