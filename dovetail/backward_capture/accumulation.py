"""Sums of gradients that meet, and accumulation into a leaf's ``.grad``, both as in eager."""

from __future__ import annotations

import sys
from typing import Any

import torch

from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import engine as private_engine
from dovetail.torch_private import recordings as private_recordings


def add_gradients(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    """Add two gradients that arrive at the same place; a function of the user's may have given none."""
    if old is None or new is None:
        return new if old is None else old
    # A sparse gradient can be added to a dense one, not the other way around.
    return new + old if old.layout is not torch.strided else old + new


def _obeys_layout_contract(gradient: torch.Tensor, variable: torch.Tensor) -> bool:
    if variable.is_contiguous() or not private_engine.is_dense(variable):
        return gradient.is_contiguous()
    return all(
        size == 1 or left == right
        for size, left, right in zip(variable.shape, gradient.stride(), variable.stride(), strict=True)
    )


def _with_layout_of(gradient: torch.Tensor, variable: torch.Tensor) -> torch.Tensor:
    if private_engine.is_dense(variable):
        # Made by the gradient, which may be of a tensor subclass.
        empty = gradient.new_empty_strided(
            variable.shape, variable.stride(), dtype=variable.dtype, device=variable.device
        )
        return empty.copy_(gradient)
    return gradient.clone(memory_format=torch.contiguous_format)


def accumulate_grad(variable: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Add a gradient to ``variable.grad``: in place where there is one, as eager does."""
    if gradient is None or not variable.requires_grad:
        return
    old = variable.grad
    is_mixed = gradient.layout is torch.strided and variable.layout is not torch.strided
    if is_mixed and not private_autograd.has_hooks(variable):
        # A sparse leaf takes a dense gradient from its own node only, not by the attribute; the node would call hooks again.
        with torch.enable_grad():
            node: Any = variable.clone().grad_fn
        node.next_functions[0][0](gradient)
    elif old is None:
        if gradient.layout is not torch.strided or variable.layout is not torch.strided:
            variable.grad = gradient.clone()
        else:
            variable.grad = _with_layout_of(gradient, variable)
    elif old.layout is not torch.strided and gradient.layout is torch.strided:
        variable.grad = gradient + old
    elif torch.is_grad_enabled():
        variable.grad = old + gradient
    else:
        old += gradient


def _references(holder: list[torch.Tensor]) -> tuple[int, int]:
    tensor = holder[0]
    return sys.getrefcount(tensor), private_recordings.storage_references(tensor)


#: The counts of a tensor that only its holder refers to.
_ALONE = _references([torch.empty(1)])


def accumulate_owned(variable: torch.Tensor, holder: list[torch.Tensor]) -> None:
    """Accumulate the gradient in ``holder``; it becomes ``.grad`` itself, without a copy, where nothing else refers to it."""
    gradient = holder[0]
    may_move = (
        variable.grad is None
        and variable.requires_grad
        and not torch.is_grad_enabled()
        and type(gradient) is torch.Tensor
        and gradient.layout is variable.layout is torch.strided
        and not gradient.requires_grad
        and _obeys_layout_contract(gradient, variable)
    )
    del gradient
    if may_move and _references(holder) <= _ALONE and _references(holder)[1] <= _ALONE[1]:
        variable.grad = holder.pop()
    else:
        accumulate_grad(variable, holder.pop())
