"""Training on several processes: passes over joint graphs that exchange gradients and parameters.

>>> from dovetail.distributed import data_parallel
>>> data_parallel(abs)(-1)
Traceback (most recent call last):
dovetail.errors.DistributedError: there is no process group
  what to do: start the program with torchrun, and call torch.distributed.init_process_group("gloo") first
"""

from dovetail.distributed import collective_errors, fully_sharded, wrapped_models  # noqa: F401  (they register hooks, rules and a pass)
from dovetail.distributed.data_parallel import data_parallel, team
from dovetail.distributed.exchange import Team
from dovetail.distributed.replicate import replicate
from dovetail.distributed.sharded_module import (
    Sharded,
    clip_grad_norm_,
    load_whole_optimizer_state,
    shard,
    whole_optimizer_state,
)
from dovetail.distributed.sharded_pass import ShardingOptions, exchange_shards

__all__ = [
    "Sharded",
    "ShardingOptions",
    "Team",
    "clip_grad_norm_",
    "data_parallel",
    "exchange_shards",
    "load_whole_optimizer_state",
    "replicate",
    "shard",
    "team",
    "whole_optimizer_state",
]
