"""Guards on sparse tensors, and where their handles (:mod:`dovetail.whole_calls.handles`) are read at a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dovetail.guards import Predicate, Step
from dovetail.runtime.origins import note_origin
from dovetail.torch_private import tracing as private_tracing
from dovetail.whole_calls.handles import make_handle, parts_of_handle


@dataclass(frozen=True)
class HandleSource(Step):
    """The handle for a sparse tensor."""

    @property
    def name(self) -> str:
        return f"{self.base.name} (sparse)"

    def read(self, value: Any) -> Any:
        handle = make_handle(value)
        note_origin(handle, value)
        return handle

    def memory(self, value: torch.Tensor) -> list[torch.Tensor]:
        # A graph that writes to one of its inputs asks while it is captured: the tensor is a real one.
        with private_tracing.disable_current_modes():
            return parts_of_handle(value)


@dataclass(frozen=True)
class SparseMatch(Predicate):
    """A sparse tensor of the same layout, size, dtype and device, that requires a gradient or not as before."""

    kind: type
    layout: torch.layout
    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> SparseMatch:
        """The predicate that holds for tensors like this one.

        >>> SparseMatch.of(torch.eye(2).to_sparse()).holds(torch.eye(2).to_sparse_csr())
        False
        """
        # Of a jagged tensor one size is a symbol, another one for each tensor.
        shape = tuple(size if type(size) is int else None for size in value.shape)
        return cls(type(value), value.layout, shape, value.dtype, value.device, value.requires_grad)

    def holds(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and SparseMatch.of(value) == self

    def describe(self, name: str) -> str:
        return f"{name} is a tensor with the layout {self.layout} of the same size and type"

    def failure(self, name: str, value: Any) -> str:
        return f"the sparse tensor `{name}` has another layout, size or type"
