"""Outputs of compiled code made safe for autograd: tensors that share memory share a version counter.

Code that computes with raw memory (Inductor's) returns tensors that may share storage with an input or with another output
without autograd knowing. An in-place write to one would change a tensor saved for the backward unnoticed, and gradients would
be silently wrong. Eager raises in that case, so such outputs are rebuilt as views.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.backends.aten import fresh
from dovetail.backends.common.memory import storage_address
from dovetail.backends.protocol import CompiledCallable
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.torch_private import operators as private_operators

Strides = tuple[int, ...]


@dataclass(frozen=True)
class _Alias:
    """Output ``index`` shares memory with some of these inputs and earlier outputs, given by index."""

    index: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass
class _Repairs:
    """The repairs that the outputs of one callable need on every call, found on the first."""

    aliases: list[_Alias] = field(default_factory=list)
    restride: list[tuple[int, Strides]] = field(default_factory=list)
    attached: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)

    @classmethod
    def find(cls, inputs: Mapping[int, Any], outputs: Sequence[Any], promised: Sequence[Strides | None]) -> _Repairs:
        """Compare the outputs of the first call with its inputs, with each other and with the promised strides."""
        found = cls()
        input_ids = {id(value) for value in inputs.values()}
        input_owners: dict[int, list[int]] = {}
        for index, value in inputs.items():
            if isinstance(value, torch.Tensor) and storage_address(value):
                input_owners.setdefault(storage_address(value), []).append(index)
        output_owners: dict[int, list[int]] = {}
        seen: set[int] = set()
        for index, value in enumerate(outputs):
            if not isinstance(value, torch.Tensor) or id(value) in input_ids:
                continue
            strides = promised[index] if index < len(promised) else None
            address = storage_address(value)
            alias = _Alias(index, tuple(input_owners.get(address, ())), tuple(output_owners.get(address, ())))
            if strides is not None and not same_strides(value.shape, value.stride(), strides):
                found.restride.append((index, strides))
                found.counted.append(index)
            elif address and id(value) not in seen:
                seen.add(id(value))
                output_owners.setdefault(address, []).append(index)
                if alias.inputs or alias.outputs:
                    found.aliases.append(alias)
                    continue
            if fresh(value) is not value:
                found.attached.append(index)
            if private_autograd_nodes.is_counted(value):
                found.counted.append(index)
        return found

    @property
    def are_needed(self) -> bool:
        """Whether there is anything to repair."""
        return bool(self.counted or self.aliases or self.attached or self.restride)

    @property
    def needed_inputs(self) -> set[int]:
        """The inputs that an output may share memory with."""
        return {source for alias in self.aliases for source in alias.inputs}

    def apply(self, inputs: Mapping[int, Any], outputs: list[Any]) -> None:
        """Repair the outputs of one call in place."""
        for index, strides in self.restride:
            value = outputs[index]
            new = torch.empty_strided(tuple(value.shape), strides, dtype=value.dtype, device=value.device)
            outputs[index] = new.copy_(value)
        for index in self.attached:
            outputs[index] = fresh(outputs[index])
        if self.counted and not torch.is_inference_mode_enabled():
            # Kernels that write to memory that they are given count as writes of the program.
            private_autograd_nodes.count_from_zero([outputs[index] for index in self.counted])
        for alias in self.aliases:
            candidates = [inputs[source] for source in alias.inputs] + [outputs[item] for item in alias.outputs]
            outputs[alias.index] = _share_version(outputs[alias.index], candidates)


def guard_outputs(compiled: CompiledCallable, promised_strides: Sequence[Strides | None] = ()) -> CompiledCallable:
    """Wrap ``compiled`` so that it runs below autograd and its outputs share version counters with the tensors that they alias.

    The first call finds which outputs alias something, and which have other strides than ``promised_strides`` (None accepts
    any); later calls run the same code, so the finding holds for them. Each call looks up anew *which* candidate an output
    aliases: two inputs may share memory in one call and not in the next. An output that is an input object stays that object.
    """
    repairs: _Repairs | None = None
    needed: set[int] = set()
    below, without_autocast = private_operators.BelowAutograd, private_operators.NoAutocast

    def run(inputs: list[Any]) -> list[Any]:
        nonlocal repairs, needed
        with below(), without_autocast():
            if repairs is None:
                sources = dict(enumerate(inputs))
                outputs = list(compiled(inputs))
                repairs = _Repairs.find(sources, outputs, promised_strides)
                needed = repairs.needed_inputs
            else:
                sources = {index: inputs[index] for index in needed} if needed else {}
                outputs = list(compiled(inputs))
            if repairs.are_needed:
                repairs.apply(sources, outputs)
        return outputs

    return run


def same_strides(shape: Sequence[int], actual: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether two strides address the same elements; dimensions of size one do not count. Those of an empty tensor, which
    Inductor makes zero, cost nothing to keep.

    >>> same_strides((1, 3), (7, 1), (3, 1))
    True
    """
    return all(size == 1 or one == other for size, one, other in zip(shape, actual, wanted, strict=True))


def _share_version(value: torch.Tensor, candidates: Sequence[torch.Tensor]) -> torch.Tensor:
    address = storage_address(value)
    for owner in candidates:
        is_lazy = owner.is_conj() or owner.is_neg()
        if storage_address(owner) == address and owner.dtype == value.dtype and not is_lazy:
            return owner.as_strided(value.shape, value.stride(), value.storage_offset()).detach()
    # Strides cannot rebuild a view of another dtype; nobody else can write to a copy.
    return value.clone()


def own_copy(
    graph: torch.fx.GraphModule, make: Callable[..., torch.fx.GraphModule] = torch.fx.GraphModule
) -> torch.fx.GraphModule:
    """Return a copy that may be changed, as ``make`` makes it: its own nodes and subgraphs, but the same constants."""
    copied = make(graph, copy.deepcopy(graph.graph))
    for name, child in list(copied.named_children()):
        if isinstance(child, torch.fx.GraphModule):
            setattr(copied, name, own_copy(child))
    return copied


def promised_strides(outputs: Sequence[Any], visible: Sequence[int]) -> list[Strides | None]:
    """Return the strides that the fake values of the visible outputs have; None for the others and for symbolic ones."""
    wanted: list[Strides | None] = [None] * len(outputs)
    for index in visible:
        entry = outputs[index]
        value = entry.meta.get("val") if isinstance(entry, torch.fx.Node) else None
        if isinstance(value, torch.Tensor) and all(type(step) is int for step in value.stride()):
            wanted[index] = tuple(value.stride())
    return wanted
