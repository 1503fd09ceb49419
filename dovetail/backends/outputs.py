"""Making a compiled graph's outputs safe to hand to autograd: version counters are shared where memory is shared.

A backend that computes with raw memory (Inductor) returns tensors that may share storage with an input or with another
output without autograd knowing. An in-place write to one would then change a tensor saved for the backward without
being noticed, and gradients would be silently wrong. Eager raises in that case, so such outputs are made anew as views.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.backends.protocol import CompiledCallable
from dovetail.torch_private import tensors as private


def fresh(value: Any) -> Any:
    """The tensor itself, or a detached alias (sharing the version counter) if it is a view or requires a gradient.

    >>> x = torch.ones(2, requires_grad=True)
    >>> fresh(x * 2).requires_grad, private.is_tensor_view(fresh(x.detach()[:1]))
    (False, False)
    """
    if isinstance(value, torch.Tensor) and (value.requires_grad or private.is_tensor_view(value)):
        return value.detach()
    return value


def storage_address(value: torch.Tensor) -> int:
    """Where the tensor's storage lies; 0 for one without memory."""
    return value.untyped_storage().data_ptr()


@dataclass(frozen=True)
class _Alias:
    """Output ``index`` shares memory with one of these: inputs and earlier outputs, by index."""

    index: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def guard_outputs(
    compiled: CompiledCallable,
    promised_strides: Sequence[tuple[int, ...] | None] = (),
) -> CompiledCallable:
    """Wrap ``compiled`` so that it runs below autograd and its outputs share version counters with what they alias.

    Which outputs alias something, and which have other strides than ``promised_strides`` (None: any will do), is found
    on the first call and holds for later ones, since the code is the same. *What* they alias is looked up on every call
    among the candidates of the first: two inputs may share memory in one call and not in the next. An output that is an
    input object stays that object.
    """
    aliases: list[_Alias] | None = None
    restride: list[tuple[int, tuple[int, ...]]] = []
    attached: list[int] = []
    needed: set[int] = set()

    def run(inputs: list[Any]) -> list[Any]:
        nonlocal aliases, restride, attached, needed
        with private.BelowAutograd(), private.NoAutocast():
            if aliases is None:
                sources = dict(enumerate(inputs))
                outputs = list(compiled(inputs))
                found, restride = _find_aliases(sources, outputs, promised_strides)
                inputs_seen = {id(value) for value in sources.values()}
                known = {alias.index for alias in found}
                attached = [
                    index
                    for index, value in enumerate(outputs)
                    if index not in known and id(value) not in inputs_seen and fresh(value) is not value
                ]
                needed = {source for alias in found for source in alias.inputs}
                aliases = found
            else:
                sources = {index: inputs[index] for index in needed}
                outputs = list(compiled(inputs))
            for index, strides in restride:
                outputs[index] = _with_strides(outputs[index], strides)
            for index in attached:
                outputs[index] = fresh(outputs[index])
            for alias in aliases:
                candidates = [sources[source] for source in alias.inputs] + [outputs[item] for item in alias.outputs]
                outputs[alias.index] = _share_version(outputs[alias.index], candidates)
        return outputs

    return run


def _find_aliases(
    inputs: Mapping[int, Any], outputs: Sequence[Any], promised_strides: Sequence[tuple[int, ...] | None]
) -> tuple[list[_Alias], list[tuple[int, tuple[int, ...]]]]:
    input_ids = {id(value) for value in inputs.values()}
    input_owners: dict[int, list[int]] = {}
    for index, value in inputs.items():
        if isinstance(value, torch.Tensor) and storage_address(value):
            input_owners.setdefault(storage_address(value), []).append(index)
    output_owners: dict[int, list[int]] = {}
    seen: set[int] = set()
    aliases: list[_Alias] = []
    restride: list[tuple[int, tuple[int, ...]]] = []
    for index, value in enumerate(outputs):
        if not isinstance(value, torch.Tensor) or id(value) in input_ids:
            continue
        strides = promised_strides[index] if index < len(promised_strides) else None
        if strides is not None and not same_strides(value.shape, value.stride(), strides):
            restride.append((index, strides))
            continue
        address = storage_address(value)
        if id(value) in seen or not address:
            continue
        seen.add(id(value))
        found = _Alias(index, tuple(input_owners.get(address, ())), tuple(output_owners.get(address, ())))
        if found.inputs or found.outputs:
            aliases.append(found)
        output_owners.setdefault(address, []).append(index)
    return aliases, restride


def same_strides(shape: Sequence[int], actual: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether two strides address the same elements; a dimension of size one, or no elements at all, has no say.

    >>> same_strides((1, 3), (7, 1), (3, 1))
    True
    """
    if any(size == 0 for size in shape):
        return True
    return all(size == 1 or one == other for size, one, other in zip(shape, actual, wanted, strict=True))


def _with_strides(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    result = torch.empty_strided(tuple(value.shape), strides, dtype=value.dtype, device=value.device)
    return result.copy_(value)


def _share_version(value: torch.Tensor, candidates: Sequence[torch.Tensor]) -> torch.Tensor:
    address = storage_address(value)
    for owner in candidates:
        if storage_address(owner) == address and owner.dtype == value.dtype and not _is_lazy(owner):
            return owner.as_strided(value.shape, value.stride(), value.storage_offset()).detach()
    # A view of another dtype cannot be made again by strides; a copy cannot be written to behind our back.
    return value.clone()


def _is_lazy(value: torch.Tensor) -> bool:
    return value.is_conj() or value.is_neg()


def own_copy(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy that may be changed: its own nodes and subgraphs, but the same constants."""
    copied = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for name, child in list(copied.named_children()):
        if isinstance(child, torch.fx.GraphModule):
            setattr(copied, name, own_copy(child))
    return copied


def promised_strides(outputs: Sequence[Any], visible: Sequence[int]) -> list[tuple[int, ...] | None]:
    """The strides that the fake values of the visible outputs have; None for the others and for symbolic ones."""
    wanted: list[tuple[int, ...] | None] = [None] * len(outputs)
    for index in visible:
        entry = outputs[index]
        value = entry.meta.get("val") if isinstance(entry, torch.fx.Node) else None
        if isinstance(value, torch.Tensor) and all(type(step) is int for step in value.stride()):
            wanted[index] = tuple(value.stride())
    return wanted
