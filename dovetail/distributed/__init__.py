"""Training on several processes: passes over joint graphs that exchange gradients and parameters.

>>> from dovetail.distributed import data_parallel
>>> data_parallel(abs)(-1)
Traceback (most recent call last):
dovetail.errors.DistributedError: there is no process group
  what to do: start the program with torchrun, and call torch.distributed.init_process_group("gloo") first
"""

from dovetail.distributed import replicas  # noqa: F401  (its rules)
from dovetail.distributed.data_parallel import data_parallel, team
from dovetail.distributed.exchange import Team
from dovetail.distributed.replicate import replicate
from dovetail.distributed.sharded_graph import ShardingOptions, spread_parameters
from dovetail.distributed.sharded_module import (
    Sharded,
    clip_grad_norm_,
    load_whole_optimizer_state,
    shard,
    whole_optimizer_state,
)

__all__ = [
    "Sharded",
    "ShardingOptions",
    "Team",
    "clip_grad_norm_",
    "data_parallel",
    "load_whole_optimizer_state",
    "replicate",
    "shard",
    "spread_parameters",
    "team",
    "whole_optimizer_state",
]
