"""Operators between the shard of a parameter that each rank has, and the whole parameter.

A forward records them, and eager runs them as they are. In a graph :mod:`dovetail.distributed.sharded_pass` replaces them, to
exchange many tensors at once and beside the computation.

- ``gather(shard)``: the whole, from all ranks' shards. Its derivative is
- ``scatter(gradient)``: this rank's shard of the mean (or sum) of all ranks' gradients.
- ``replica(whole)`` and ``reduce(gradient)``: the same for a parameter that all ranks have whole.

``leaves`` says that gradients may leave the graph that computes them. Shards are cut along the first dimension into pieces of equal
length; the last ones are filled up with zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.errors import HigherOrderGradientError
from dovetail.torch_private import distributed as private_distributed

_library = torch.library.Library("dovetail_distributed", "FRAGMENT")
_library.define("gather(Tensor shard, int rows, bool leaves, int size, str group, str reduction) -> Tensor")
_library.define("scatter(Tensor gradient, int size, str group, str reduction) -> Tensor")
_library.define("replica(Tensor whole, bool leaves, int size, str group, str reduction) -> Tensor")
_library.define("reduce(Tensor gradient, int size, str group, str reduction) -> Tensor")
collectives = private_distributed.functional_collectives()


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


def _gather(shard: torch.Tensor, rows: int, leaves: bool, size: int, group: str, reduction: str) -> torch.Tensor:
    begun = collectives.all_gather_into_tensor(shard.contiguous(), size, group)
    whole: torch.Tensor = collectives.wait_tensor(begun)
    return whole if whole.shape[0] == rows else whole[:rows].clone()


def _scatter(gradient: torch.Tensor, size: int, group: str, reduction: str) -> torch.Tensor:
    given = filled_up(gradient, size)
    found: torch.Tensor = collectives.wait_tensor(
        collectives.reduce_scatter_tensor(given / size if reduction == "mean" else given, "sum", size, group)
    )
    return found


def _replica(whole: torch.Tensor, leaves: bool, size: int, group: str, reduction: str) -> torch.Tensor:
    return whole.clone()


def _reduce(gradient: torch.Tensor, size: int, group: str, reduction: str) -> torch.Tensor:
    given = gradient / size if reduction == "mean" else gradient
    found: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(given.contiguous(), "sum", group))
    return found


for _name, _kernel in (("gather", _gather), ("scatter", _scatter), ("replica", _replica), ("reduce", _reduce)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("dovetail_distributed::gather", lib=_library)
def _(shard: torch.Tensor, rows: int, leaves: bool, size: int, group: str, reduction: str) -> torch.Tensor:
    return shard.new_empty((rows, *shard.shape[1:]))


@torch.library.register_fake("dovetail_distributed::scatter", lib=_library)
def _(gradient: torch.Tensor, size: int, group: str, reduction: str) -> torch.Tensor:
    return gradient.new_empty((shard_rows(gradient.shape[0], size), *gradient.shape[1:]))


@torch.library.register_fake("dovetail_distributed::replica", lib=_library)
def _(whole: torch.Tensor, leaves: bool, size: int, group: str, reduction: str) -> torch.Tensor:
    return whole.clone()


@torch.library.register_fake("dovetail_distributed::reduce", lib=_library)
def _(gradient: torch.Tensor, size: int, group: str, reduction: str) -> torch.Tensor:
    return gradient.new_empty(gradient.shape)


gather = torch.ops.dovetail_distributed.gather.default
scatter = torch.ops.dovetail_distributed.scatter.default
replica = torch.ops.dovetail_distributed.replica.default
reduce = torch.ops.dovetail_distributed.reduce.default


def _note(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.settings = inputs[-3:]


def _gather_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return scatter(gradient, *ctx.settings), None, None, None, None, None


def _replica_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return reduce(gradient, *ctx.settings), None, None, None, None


def _no_second(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    raise HigherOrderGradientError(
        "the gradient of a parameter that is sharded over ranks is differentiated again",
        advice="differentiate by inputs first (torch.autograd.grad with create_graph=True), and by parameters last",
    )


torch.library.register_autograd("dovetail_distributed::gather", _gather_backward, setup_context=_note, lib=_library)
torch.library.register_autograd("dovetail_distributed::replica", _replica_backward, setup_context=_note, lib=_library)
for _name in ("scatter", "reduce"):
    torch.library.register_autograd(f"dovetail_distributed::{_name}", _no_second, setup_context=_note, lib=_library)
