"""A process group of any size in one process: captures see all ranks, exchanges give back what they were given."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from dovetail.errors import DistributedError, OptionError
from dovetail.torch_private import distributed as private_distributed


@contextmanager
def simulated_world(ranks: int) -> Iterator[None]:
    """A block in which this process is rank 0 of that many; values that were exchanged mean nothing in it.

    Raises :class:`DistributedError` where there is a process group already.

    >>> with simulated_world(1024):
    ...     torch.distributed.get_world_size()
    1024
    """
    if type(ranks) is not int or ranks < 1:
        raise OptionError(f"the number of ranks must be a whole number above 0, not {ranks!r}")
    if torch.distributed.is_initialized():
        raise DistributedError("there is a process group already", advice="simulate in a process without one")
    # Torch has every line of a traceback begin with the rank from here on.
    hook = sys.excepthook
    torch.distributed.init_process_group("fake", store=private_distributed.fake_store(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = hook


def simulated_mesh(**sizes: int) -> DeviceMesh:
    """A mesh of all ranks of a simulated world, of named dimensions, the last of which are neighbours.

    Only the groups of this process's rank are made, one for each dimension; ``init_device_mesh`` makes those of all ranks.
    """
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    groups = []
    for dimension in range(len(sizes)):
        own = ranks[tuple(slice(None) if other == dimension else 0 for other in range(len(sizes)))]
        groups.append(torch.distributed.new_group(own.tolist()))
    return DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=tuple(sizes))
