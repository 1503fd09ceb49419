"""Operators between the shard of a parameter that each rank has, and the whole parameter.

A forward records them, and eager runs them as they are. In a graph :mod:`dovetail.distributed.sharded_pass` replaces them, to
exchange many tensors at once and beside the computation.

- ``gather(shard)``: the whole, from all ranks' shards. Its derivative is
- ``scatter(gradient)``: this rank's shard of the mean (or sum) of all ranks' gradients.
- ``replica(whole)`` and ``reduce(gradient)``: the same for a parameter that all ranks have whole.

- ``unshard(shard)``, ``reshard(gradient)`` and ``average(gradient)``: those of FSDP, whose shards are DTensors, which watch
  themselves what is computed. The last one is for shards that several ranks have.
- ``of_first_rank(buffer)``: what ``DistributedDataParallel`` does with buffers in front of a forward.

``leaves`` says that gradients may leave the graph that computes them. Shards are cut along the first dimension into pieces of equal
length; the last ones are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dovetail.errors import HigherOrderGradientError
from dovetail.torch_private import distributed as private_distributed

_library = torch.library.Library("dovetail_distributed", "DEF")
collectives = private_distributed.functional_collectives()


def operator(arguments: str, fake: Callable[..., torch.Tensor]) -> Callable[[Callable[..., torch.Tensor]], Any]:
    """A decorator: the operator with these arguments that returns a new tensor; ``fake`` computes on tensors without data."""

    def define(kernel: Callable[..., torch.Tensor]) -> Any:
        name = kernel.__name__
        _library.define(f"{name}({arguments}) -> Tensor")
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dovetail_distributed::{name}", fake, lib=_library)
        return getattr(torch.ops.dovetail_distributed, name).default

    return define


def shard_rows(rows: int, size: int) -> int:
    """The number of rows of each rank's shard.

    >>> shard_rows(7, 4), shard_rows(8, 4), shard_rows(1, 4)
    (2, 2, 1)
    """
    return -(-rows // size)


def filled_up(whole: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor with rows of zeros behind it, so that it can be cut into ``size`` equal shards."""
    missing = shard_rows(whole.shape[0], size) * size - whole.shape[0]
    if not missing:
        return whole.contiguous()
    return torch.cat([whole, whole.new_zeros((missing, *whole.shape[1:]))])


@operator(
    "Tensor shard, int rows, bool leaves, int size, str group, str reduction",
    lambda shard, rows, *_: shard.new_empty((rows, *shard.shape[1:])),
)
def gather(shard: torch.Tensor, rows: int, leaves: bool, size: int, group: str, reduction: str) -> torch.Tensor:
    """The whole, from the shards of all ranks."""
    begun = collectives.all_gather_into_tensor(shard.contiguous(), size, group)
    whole: torch.Tensor = collectives.wait_tensor(begun)
    return whole if whole.shape[0] == rows else whole[:rows].clone()


@operator(
    "Tensor gradient, int size, str group, str reduction",
    lambda gradient, size, *_: gradient.new_empty((shard_rows(gradient.shape[0], size), *gradient.shape[1:])),
)
def scatter(gradient: torch.Tensor, size: int, group: str, reduction: str) -> torch.Tensor:
    """This rank's shard of the mean or sum of all ranks' gradients."""
    given = filled_up(gradient, size)
    begun = collectives.reduce_scatter_tensor(given / size if reduction == "mean" else given, "sum", size, group)
    return collectives.wait_tensor(begun)  # type: ignore[no-any-return]


@operator("Tensor whole, bool leaves, int size, str group, str reduction", lambda whole, *_: whole.clone())
def replica(whole: torch.Tensor, leaves: bool, size: int, group: str, reduction: str) -> torch.Tensor:
    """A parameter that all ranks have whole."""
    return whole.clone()


@operator(
    "Tensor gradient, int size, str group, str reduction", lambda gradient, *_: gradient.new_empty(gradient.shape)
)
def reduce(gradient: torch.Tensor, size: int, group: str, reduction: str) -> torch.Tensor:
    """The mean or sum of all ranks' gradients."""
    given = gradient / size if reduction == "mean" else gradient
    return collectives.wait_tensor(collectives.all_reduce(given.contiguous(), "sum", group))  # type: ignore[no-any-return]


@operator(
    "Tensor shard, bool again, int size, str group, str reduction",
    lambda shard, again, size, *_: shard.new_empty((shard.shape[0] * size, *shard.shape[1:])),
)
def unshard(shard: torch.Tensor, again: bool, size: int, group: str, reduction: str) -> torch.Tensor:
    """The whole, from the shards of all ranks, whatever is computed from shards besides; ``again``: also for the backward."""
    return collectives.wait_tensor(collectives.all_gather_into_tensor(shard.contiguous(), size, group))  # type: ignore[no-any-return]


@operator(
    "Tensor gradient, int size, str group, str reduction",
    lambda gradient, size, *_: gradient.new_empty((gradient.shape[0] // size, *gradient.shape[1:])),
)
def reshard(gradient: torch.Tensor, size: int, group: str, reduction: str) -> torch.Tensor:
    """This rank's shard of the mean or sum of all ranks' gradients."""
    given = gradient / size if reduction == "mean" else gradient
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(given.contiguous(), "sum", size, group))  # type: ignore[no-any-return]


@operator("Tensor gradient, int size, str group, str reduction", lambda gradient, *_: torch.empty_like(gradient))
def average(gradient: torch.Tensor, size: int, group: str, reduction: str) -> torch.Tensor:
    """The mean or sum of the gradients of all ranks that have the same shard."""
    given = gradient / size if reduction == "mean" else gradient
    return collectives.wait_tensor(collectives.all_reduce(given.contiguous(), "sum", group))  # type: ignore[no-any-return]


@operator("Tensor buffer, int size, str group", lambda buffer, *_: torch.empty_like(buffer))
def of_first_rank(buffer: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The first rank's value."""
    return collectives.wait_tensor(collectives.broadcast(buffer.contiguous(), 0, group))  # type: ignore[no-any-return]


def _note(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.settings = inputs[-3:]


def _first(backward: Any, others: int) -> Callable[..., tuple[Any, ...]]:
    return lambda ctx, gradient: (backward(gradient, *ctx.settings), *[None] * others)


def _no_second(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    raise HigherOrderGradientError(
        "the gradient of a parameter that is sharded over ranks is differentiated again",
        advice="differentiate by inputs first (torch.autograd.grad with create_graph=True), and by parameters last",
    )


for _operator, _backward in (
    (gather, _first(scatter, 5)),
    (replica, _first(reduce, 4)),
    (scatter, _no_second),
    (reduce, _no_second),
):
    torch.library.register_autograd(_operator.name(), _backward, setup_context=_note, lib=_library)
