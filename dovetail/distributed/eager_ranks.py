"""A rank that leaves a step to eager while others run its graph: all of them say so.

The exchanges of a graph are others than those of torch's wrappers. Each graph with exchanges begins by asking whether all ranks
have the same plan; so a wrapped module that is called as in eager inside of a compiled function asks too. If all ranks run
eagerly they agree; if one alone does, all of them raise :class:`RanksDifferError` before anything else is sent.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dovetail.distributed.plan import meet_graphs
from dovetail.face.dispatcher import Dispatcher
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import fsdp as private_fsdp


def _in_compiled_function() -> bool:
    """Whether a compiled function has called what runs now. The graph that another rank may run would be this function's."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not Dispatcher.__call__.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _before_replica(model: Any) -> None:
    if not _in_compiled_function() or private_distributed.is_joining(model):
        return
    if (torch.is_grad_enabled() and model.require_backward_grad_sync) or private_distributed.syncs_buffers(model):
        device = next(model.module.parameters()).device
        name = private_distributed.process_group_name(model.process_group)
        meet_graphs([name], device, "DistributedDataParallel as in eager, outside of a graph")


def _before_spread(state: Any) -> None:
    if not _in_compiled_function():
        return
    with private_fsdp.beginning(state) as groups:
        meet_graphs(
            [private_distributed.process_group_name(group) for group in groups],
            private_fsdp.device_of(state),
            "fully_shard as in eager, outside of a graph",
        )


private_distributed.before_forward(DistributedDataParallel, "_pre_forward", _before_replica)


@functools.cache
def watch_fsdp() -> None:
    """From now on modules under ``fully_shard`` ask too; until a program uses it, FSDP is not loaded."""
    private_distributed.before_forward(private_fsdp.state_class(), "_root_pre_forward", _before_spread)
