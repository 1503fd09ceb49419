"""Memory of functional tensors that is exchanged, as ``tensor.data = value`` does it."""

from __future__ import annotations

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = ["FunctionalTensor"]


def of_same_memory(value: torch.Tensor) -> torch.Tensor:
    """Another functional tensor of a functional tensor's memory, which nothing records; it keeps that memory.

    >>> # old = of_same_memory(traced); set_memory(traced, other)
    """
    same = FunctionalTensor(value.elem, torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL))  # type: ignore[arg-type]
    set_memory(same, value)
    return same


def set_memory(target: torch.Tensor, value: torch.Tensor) -> None:
    """Have a functional tensor lie where another one does, with its own version counter and its own place in autograd's graph.

    The outer tensor is told apart by its storage, the inner one holds the values.
    """
    torch.Tensor.data.__set__(target, value)  # type: ignore[attr-defined]
    target.elem = value.elem
