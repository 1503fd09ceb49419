"""Outputs of a recording, handed out so that the next replay cannot change the caller's tensors.

Tensors that the user gets are copied out of the recording's memory. Tensors that only the runtime sees (saved for the
backward) are handed out in place, and the recording is not replayed until the last reference to them is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.backends.common.memory import is_dense, span, storage_address
from dovetail.torch_private import recordings as private_recordings

#: A tensor of the recording with the indices of the outputs that it is.
Output = tuple[list[int], torch.Tensor]
#: Shape, strides and offset of a view.
View = tuple[torch.Size, tuple[int, ...], Any]


class Results:
    """Hands out the outputs of one recording; made once, when the recording is.

    ``given``: the tensors that were recorded with, one for each input; ``visible``: outputs that the user may keep.
    """

    def __init__(self, outputs: Sequence[Any], given: Sequence[Any], visible: frozenset[int]) -> None:
        self._outputs: list[Any] = [None if isinstance(value, torch.Tensor) else value for value in outputs]
        #: Outputs that are inputs, or views of inputs (with the distance of the first elements): output, input, view.
        self._inputs: list[tuple[int, int, View | None]] = []
        #: Memory that is copied, and the outputs in it: the copy itself (None) or a view of it.
        self._copied: list[torch.Tensor] = []
        self._copied_outputs: list[list[tuple[list[int], View | None]]] = []
        #: Tensors handed out in place.
        self._kept: list[Output] = []
        sources = {id(value): index for index, value in enumerate(given) if isinstance(value, torch.Tensor)}
        owners: dict[int, int] = {}
        for index, value in enumerate(given):
            if isinstance(value, torch.Tensor) and storage_address(value):
                owners.setdefault(storage_address(value), index)
        groups: dict[int, dict[int, Output]] = {}
        for index, value in enumerate(outputs):
            if not isinstance(value, torch.Tensor):
                continue
            owner = owners.get(storage_address(value))
            if id(value) in sources:
                self._inputs.append((index, sources[id(value)], None))
            elif owner is None:
                # Tensors without memory share the address 0 with nobody.
                group = groups.setdefault(storage_address(value) or -1 - id(value), {})
                group.setdefault(id(value), ([], value))[0].append(index)
            elif given[owner].dtype == value.dtype:
                distance = value.storage_offset() - given[owner].storage_offset()
                self._inputs.append((index, owner, (value.shape, value.stride(), distance)))
            else:
                # An input seen as another dtype is copied: the next call's inputs will lie there.
                self._copy([([index], value)])
        for group in groups.values():
            members = list(group.values())
            if visible.isdisjoint(index for indices, _ in members for index in indices):
                self._kept += members
            else:
                self._copy(members)
        # One tensor for each piece of memory.
        own = {storage_address(tensor): tensor for _, tensor in self._kept}
        self._users = [(tensor, private_recordings.storage_references(tensor)) for tensor in own.values()]
        self.kept = tuple(own)
        self._templates = [(item.shape, item.stride(), item.dtype, item.device) for item in self._copied]

    def _copy(self, members: list[Output]) -> None:
        """Have tensors copied that share one piece of memory."""
        first = members[0][1]
        if len(members) > 1 and any(tensor.dtype != first.dtype or tensor.numel() == 0 for _, tensor in members):
            for member in members:
                self._copy([member])
        elif len(members) == 1 and is_dense(first):
            self._copied.append(first)
            self._copied_outputs.append([(members[0][0], None)])
        else:
            start = min(tensor.storage_offset() for _, tensor in members)
            end = max(tensor.storage_offset() + span(tensor) for _, tensor in members)
            self._copied.append(first.as_strided((end - start,), (1,), start))
            self._copied_outputs.append(
                [(places, (item.shape, item.stride(), item.storage_offset() - start)) for places, item in members]
            )

    def in_use(self) -> bool:
        """Return whether Python or autograd still refers to a tensor that was handed out in place."""
        return any(private_recordings.storage_references(tensor) > users for tensor, users in self._users)

    def hand_out(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of the replay that has just run, for the caller's ``inputs``."""
        outputs = list(self._outputs)
        for index, source, view in self._inputs:
            owner = inputs[source]
            if view is not None:
                owner = owner.as_strided(view[0], view[1], owner.storage_offset() + view[2]).detach()
            outputs[index] = owner
        handed = [(indices, tensor.detach()) for indices, tensor in self._kept]
        for copied, members in zip(_copies(self._copied, self._templates), self._copied_outputs, strict=True):
            handed += [
                (places, copied if view is None else copied.as_strided(*view).detach()) for places, view in members
            ]
        for indices, tensor in handed:
            for index in indices:
                outputs[index] = tensor
        return outputs


def _copies(sources: list[torch.Tensor], templates: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Copy tensors with few kernels."""
    made = [torch.empty_strided(shape, steps, dtype=dtype, device=device) for shape, steps, dtype, device in templates]
    if made:
        torch.ops.aten._foreach_copy_.default(made, sources)
    return made
