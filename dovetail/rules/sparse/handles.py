"""Sparse tensors, and jagged ones, at the edge of a graph: a graph has tickets for them, which only opaque calls read.

A graph is made of dense tensors. A sparse one (here: one of ``SPARSE_LAYOUTS``; jagged nested tensors count among them) goes
through it as its *ticket*, a tensor of one number that has the real one as an attribute; calls that are given a ticket run eagerly,
on the real tensor. Whatever a gradient of a sparse tensor is when it comes (sparse, or dense after a dense one came from outside),
its ticket carries it. A sum of two tickets is no ticket: what takes one apart says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import HigherOrderGradientError, InputError
from dovetail.guards import Predicate, Step

SPARSE_LAYOUTS = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged}
)
_CARRIED = "dovetail_carried"


def make_ticket(value: torch.Tensor) -> torch.Tensor:
    """A ticket for a tensor; a gradient of the ticket, itself a ticket, goes on to the tensor.

    >>> carried_by(make_ticket(torch.eye(2).to_sparse())).layout
    torch.sparse_coo
    """
    if value.requires_grad and torch.is_grad_enabled():
        ticket: torch.Tensor = _Ticket.apply(value)  # type: ignore[no-untyped-call]
    else:
        ticket = torch.zeros((), dtype=torch.float64)
    setattr(ticket, _CARRIED, value)
    return ticket


def is_ticket(value: Any) -> bool:
    """Whether a tensor is a ticket.

    >>> is_ticket(torch.zeros(()))
    False
    """
    return hasattr(value, _CARRIED)


def carried_by(ticket: torch.Tensor) -> torch.Tensor:
    """The tensor that a ticket is for. Raises :class:`InputError` for a tensor that should be a ticket and is none."""
    found = getattr(ticket, _CARRIED, None)
    if found is None:
        raise InputError(
            "a sparse tensor was lost on its way through a compiled function: two gradients of it were added up, or the backend "
            "has copied it",
            advice='use the sparse tensor once in a function, and backend="aten"',
        )
    return found  # type: ignore[no-any-return]


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


def parts_of_ticket(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The components of what a ticket is for; of another tensor, itself."""
    return components_of(carried_by(tensor)) if is_ticket(tensor) else [tensor]


def redeem(ticket: torch.Tensor) -> torch.Tensor:
    """The tensor that a ticket is for, as a result of the graph that the ticket comes from.

    >>> redeem(make_ticket(torch.eye(2).to_sparse())).layout
    torch.sparse_coo
    """
    if ticket.requires_grad:
        with torch.enable_grad():
            return _Redeemed.apply(ticket)  # type: ignore[no-untyped-call,no-any-return]
    return carried_by(ticket)


def _first_order_only() -> None:
    if torch.is_grad_enabled():
        raise HigherOrderGradientError(
            "a second derivative through a compiled function is asked for (create_graph=True), with a sparse tensor",
            advice="take both derivatives inside the compiled function, or run this one eagerly",
        )


class _Ticket(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return torch.zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        _first_order_only()
        return carried_by(gradient)


class _Redeemed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return carried_by(ticket).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        _first_order_only()
        return make_ticket(gradient)


@dataclass(frozen=True)
class TicketSource(Step):
    """The ticket for a sparse tensor."""

    @property
    def name(self) -> str:
        return f"{self.base.name} (sparse)"

    def read(self, value: Any) -> Any:
        ticket = make_ticket(value)
        ticket.wrapped_in = [(value, value._version)]  # type: ignore[attr-defined]
        return ticket

    def memory(self, value: torch.Tensor) -> list[torch.Tensor]:
        return parts_of_ticket(value)


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
