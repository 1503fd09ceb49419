"""Process groups, the operators that exchange tensors between ranks, and the wrappers for data-parallel training."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
import torch.distributed


def process_group(name: str) -> Any:
    """The process group with this name, which is how operators name one; raises RuntimeError if there is none."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def process_group_name(group: Any) -> str:
    """The name of a process group, as operators take it; None is the default group."""
    found = group if group is not None else torch.distributed.distributed_c10d._get_default_group()
    return str(found.group_name)


def functional_collectives() -> Any:
    """The operators ``all_reduce``, ``wait_tensor`` and so on that return new tensors, ready to be traced."""
    importlib.import_module("torch.distributed._functional_collectives")
    return torch.ops._c10d_functional


def why_not_replicated(model: Any) -> str:
    """Why the forward of this DistributedDataParallel cannot be taken apart, or ""."""
    if model.mixed_precision is not None:
        return "it computes in mixed precision"
    if model._use_python_reducer or model._delay_all_reduce_all_params:
        return "it exchanges gradients in a way of its own"
    if model._comm_hooks:
        return "it has a communication hook"
    if model._join_config.enable:
        return "it is in a join() block"
    return ""


def syncs_buffers(model: Any) -> bool:
    """Whether this DistributedDataParallel sends the first rank's buffers to all in its next forward.

    Before torch 2.12 the flag has another name.
    """
    wanted = model.forward_sync_buffers if hasattr(model, "forward_sync_buffers") else model.broadcast_buffers
    return bool(wanted) and model.require_forward_param_sync and len(model.modules_buffers) > 0


def fsdp_forwards() -> list[Any]:
    """The functions that run before the forward of a module sharded by FSDP, of either version."""
    found = []
    for module, kind, name in (
        ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", "_pre_forward"),
        ("torch.distributed.fsdp", "FullyShardedDataParallel", "forward"),
    ):
        with contextlib.suppress(ImportError):
            owner = getattr(importlib.import_module(module), kind, None)
            found += [getattr(owner, name)] if hasattr(owner, name) else []
    return found


def exchanged_parameters(model: Any) -> list[torch.Tensor]:
    """The parameters of a DistributedDataParallel in the order in which its reducer numbers them."""
    return list(model._module_parameters)


def remove_native_hooks(model: Any) -> None:
    """Take the reducer's hooks off the parameters of a DistributedDataParallel; the reducer is told from Python instead."""
    model.reducer._remove_autograd_hooks()


def gradient_is_ready(reducer: Any, place: int) -> None:
    """Do what the reducer's native hook of a parameter does."""
    reducer._autograd_hook(place)
