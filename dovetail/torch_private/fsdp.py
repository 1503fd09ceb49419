"""The state that ``fully_shard`` (FSDP2) keeps of a module's parameters."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch


def groups_of(state: Any) -> Any:
    """The groups of parameters that are gathered together; before torch 2.12 there is one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def begin(state: Any) -> bool:
    """Do what FSDP does in front of the first forward; returns whether there was something to do."""
    if state._is_root is not None:
        return False
    state._lazy_init()
    return True


def state_class() -> type:
    """The class of what FSDP keeps of a module."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return FSDPState


def is_loaded() -> bool:
    """Whether the program may have modules under ``fully_shard``."""
    return "torch.distributed.fsdp._fully_shard._fsdp_state" in sys.modules


@contextlib.contextmanager
def beginning(state: Any) -> Iterator[list[Any]]:
    """In front of a forward: the process groups that graphs exchange with, if the module is the outermost, each once.

    If the block raises, the forward has not begun.
    """
    begin(state)
    context, found = state._state_ctx, {}
    if context.iter_forward_root is None:
        infos = [group.mesh_info for item in context.all_states for group in groups_of(item)]
        found = {info.shard_process_group: None for info in infos if type(info).__name__ == "FSDPMeshInfo"}
    try:
        yield list(found)
    except BaseException:
        state._training_state = type(state._training_state).IDLE
        raise


def why_not_in_graph(state: Any) -> str:
    """Why a graph cannot do what the hooks of a state do, or ""."""
    if len(state._modules) != 1:
        return "several modules are gathered together"
    context = state._state_ctx
    if state._training_state.name != "IDLE" or context.iter_forward_root is not None:
        return "a forward or backward has begun outside of the graph"
    if not context.is_last_backward:
        return "another backward is to follow (set_is_last_backward)"
    for group in groups_of(state):
        reason = _why_not_group(group)
        if reason:
            return reason
    return ""


def _why_not_group(group: Any) -> str:
    if type(group.mesh_info).__name__ != "FSDPMeshInfo":
        return "parameters are replicated too (a mesh of two dimensions)"
    if group._training_state.name != "IDLE" or group._sharded_state.name != "SHARDED":
        return "parameters are gathered already"
    if not group.reduce_grads or not group.reshard_after_backward:
        return "gradients stay where they are (set_requires_gradient_sync, set_reshard_after_backward)"
    custom = type(group._all_gather_comm).__name__ != "DefaultAllGather"
    custom = custom or type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter"
    if custom or group._all_reduce_hook is not None or group.gradient_divide_factor is not None:
        return "exchanges are of the program's own (communication, hook, factor)"
    if getattr(group, "reduce_scatter_unused_params", False) or group.force_sum_reduction_for_comms:
        return "exchanges are of the program's own (unused parameters, sums)"
    if getattr(group.mesh_info, "reduce_scatter_process_group", None) is not None:
        return "gradients have a process group of their own"
    for param in group.fsdp_params:
        if param.is_dtensor:
            return "parameters are spread by tensor parallelism too"
        if param.sharded_size[1:] != param._orig_size[1:] or getattr(param, "_extensions_data", None) is not None:
            return "parameters are cut or gathered in a way of their own"
        if param.offload_to_cpu and group.device.type != "cpu":
            return "parameters are kept on the CPU"
        whole = getattr(param, "_unsharded_param", None)
        if getattr(param, "unsharded_accumulated_grad", None) is not None or (
            whole is not None and whole.grad is not None
        ):
            return "gradients of earlier calls have not been reduced"
        if torch.float16 in (param.reduce_dtype, param.param_dtype, param.orig_dtype):
            return "gradients are divided twice (float16)"
    return ""


def parameters_of(state: Any) -> Iterator[tuple[Any, list[tuple[Any, str]], tuple[Any, ...]]]:
    """Interpreted: each parameter as FSDP has it, the modules and names under which it is found, and how it is spread.

    That is the process group, its size, whether the parameter is freed after the forward, its rows here, here with those that
    fill it up, and in all, and the dtypes in which it is used and reduced.
    """
    for group in groups_of(state):
        members, again = group.mesh_info.shard_process_group, group.post_forward_mesh_info is not None
        for param in group.fsdp_params:
            info, rows = param._module_info, param.sharded_size[0]
            padded, whole = param.padded_sharded_param_size[0], param._orig_size[0]
            owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            sizes = group.mesh_info.shard_mesh_size, again, rows, padded, whole
            yield param, owners, (members, *sizes, param.param_dtype, param.reduce_dtype)


def put_parameter(owner: torch.nn.Module, name: str, value: Any) -> None:
    """Let a module have a tensor under the name of a parameter."""
    owner._parameters[name] = value


def parameter(owner: torch.nn.Module, name: str) -> Any:
    """The tensor that a module has under the name of a parameter."""
    return owner._parameters[name]


def _cast(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype) if torch.is_floating_point(value) else value


def cast_inputs(state: Any, values: Any) -> Any:
    """The arguments of a forward in the dtype that the policy wants."""
    policy = state._mp_policy
    return _casted(policy.param_dtype if policy.cast_forward_inputs else None, values)


def cast_outputs(state: Any, values: Any) -> Any:
    """The result of a forward in the dtype that the policy wants."""
    return _casted(state._mp_policy.output_dtype, values)


def _casted(dtype: torch.dtype | None, values: Any) -> Any:
    if dtype is None:
        return values
    return torch.distributed.utils._apply_to_tensors(functools.partial(_cast, dtype), values)


def device_of(state: Any) -> torch.device:
    """The device to which the outermost module's inputs are moved."""
    return state._device  # type: ignore[no-any-return]
