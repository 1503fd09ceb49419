"""Handles: how sparse tensors, and jagged ones, pass through a graph, in which only whole calls read them.

A graph is made of dense tensors. A sparse one (here: one of ``SPARSE_LAYOUTS``; jagged nested tensors count among them) goes
through it as its *handle*, a tensor of one number that has the real one as an attribute; calls that are given a handle run eagerly,
on the real tensor. The handle of a gradient carries it as it comes: sparse, or dense after a dense one came from outside. A sum of
two handles is no handle; to read one raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dovetail.errors import HigherOrderGradientError, InputError

SPARSE_LAYOUTS = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged}
)
_CARRIED = "dovetail_carried"
Conversion = Callable[[torch.Tensor], torch.Tensor]


def make_handle(value: torch.Tensor) -> torch.Tensor:
    """A handle for a tensor; a gradient of the handle, itself a handle, goes on to the tensor.

    >>> carried_by(make_handle(torch.eye(2).to_sparse())).layout
    torch.sparse_coo
    """
    if value.requires_grad and torch.is_grad_enabled():
        handle: torch.Tensor = _Converted.apply(value, _number, carried_by)  # type: ignore[no-untyped-call]
    else:
        handle = _number(value)
    setattr(handle, _CARRIED, value)
    return handle


def is_handle(value: Any) -> bool:
    """Whether a tensor is a handle.

    >>> is_handle(torch.zeros(()))
    False
    """
    return hasattr(value, _CARRIED)


def carried_by(handle: torch.Tensor) -> torch.Tensor:
    """The tensor that a handle is for. Raises :class:`InputError` for a tensor that should be a handle and is none."""
    found = getattr(handle, _CARRIED, None)
    if found is None:
        raise InputError(
            "a sparse tensor was lost on its way through a compiled function: two gradients of it were added up, or the backend "
            "has copied it",
            advice='use the sparse tensor once in a function, and backend="aten"',
        )
    return found  # type: ignore[no-any-return]


def detached(value: torch.Tensor) -> torch.Tensor:
    """``value.detach()``, which stays a handle.

    >>> is_handle(detached(make_handle(torch.eye(2).to_sparse())))
    True
    """
    found = value.detach()
    if is_handle(value):
        setattr(found, _CARRIED, carried_by(value))
    return found


def components_of(value: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one is made of.

    >>> [part.shape for part in components_of(torch.eye(2).to_sparse())]
    [torch.Size([2, 2]), torch.Size([2])]
    """
    parts: Any = value
    if value.layout is torch.strided:
        return [value]
    if value.layout is torch.sparse_coo:
        return [parts._indices(), parts._values()]
    if value.layout is torch.jagged:
        return [parts._values, parts._offsets]
    by_rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = [value.crow_indices(), value.col_indices()] if by_rows else [value.ccol_indices(), value.row_indices()]
    return [*indices, value.values().detach()]


def parts_of_handle(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The components of the tensor that a handle is for; of another tensor, itself."""
    return components_of(carried_by(tensor)) if is_handle(tensor) else [tensor]


def redeem(handle: torch.Tensor) -> torch.Tensor:
    """The tensor that a handle is for, as a result of the graph that the handle comes from.

    >>> redeem(make_handle(torch.eye(2).to_sparse())).layout
    torch.sparse_coo
    """
    if handle.requires_grad:
        with torch.enable_grad():
            return _Converted.apply(handle, _detached, make_handle)  # type: ignore[no-untyped-call,no-any-return]
    return carried_by(handle)


def _number(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)


def _detached(handle: torch.Tensor) -> torch.Tensor:
    return carried_by(handle).detach()


class _Converted(torch.autograd.Function):
    """A tensor made of another one, with a gradient that is made of the other's gradient the other way round."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, convert: Conversion, back: Conversion) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.back = back
        return convert(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        if gradient is not None and torch.is_grad_enabled():
            raise HigherOrderGradientError(
                "a second derivative through a compiled function is asked for (create_graph=True), with a sparse tensor",
                advice="take both derivatives inside the compiled function, or run this one eagerly",
            )
        return None if gradient is None else ctx.back(gradient), None, None
