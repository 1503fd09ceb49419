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


def is_prepared(state: Any) -> bool:
    """Whether :func:`prepare` has nothing to do."""
    return state._is_root is not None and not _without_whole(state)


def on_meta(state: Any) -> str:
    """A parameter of its modules that has no memory yet, with which no forward may begin, or ""."""
    names = (name for module in state._modules for name, value in module.named_parameters() if value.is_meta)
    return next(names, "")


def prepare(state: Any) -> None:
    """Do what FSDP does in front of the first forward and in it.

    A hook that finds a gradient that a graph has kept asks for the whole parameter, which eager's first gather makes.
    """
    if state._is_root is None:
        state._lazy_init()
    for group, param in _without_whole(state):
        sizes, dtypes = [param.padded_sharded_param_size.numel()], [param.param_dtype or param.orig_dtype]
        param.init_all_gather_outputs(sizes, dtypes, group.mesh_info.shard_mesh_size, group.device)
        param.alloc_all_gather_outputs()
        param.init_unsharded_param()
        param.free_unsharded_param()


def _without_whole(state: Any) -> list[tuple[Any, Any]]:
    def is_plain(group: Any, param: Any) -> bool:
        own = hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
        return not own and _is_sharded(group.mesh_info)

    return [item for item in _all_of(state) if not hasattr(item[1], "_unsharded_param") and is_plain(*item)]


def state_class() -> type:
    """The class of what FSDP keeps of a module."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return FSDPState


def is_used() -> bool:
    """Whether there are modules under ``fully_shard``; a program that has only imported it has none."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return False
    from torch.distributed import _composable_state

    states = (reference() for reference in _composable_state._module_state_mapping.values())
    return any(isinstance(state, state_class()) for state in states)


@contextlib.contextmanager
def beginning(state: Any) -> Iterator[list[Any]]:
    """In front of a forward: the process groups that graphs exchange with, if the module is the outermost, each once.

    If the block raises, the forward has not begun.
    """
    if state._is_root is None:
        state._lazy_init()
    context, found = state._state_ctx, {}
    if context.iter_forward_root is None:
        infos = [group.mesh_info for item in context.all_states for group in groups_of(item)]
        found = {info.shard_process_group: None for info in infos if _is_sharded(info)}
        found |= {info.replicate_process_group: None for info in infos if type(info).__name__ == "HSDPMeshInfo"}
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
    for group in groups_of(state):
        reason = _why_not_group(group)
        if reason:
            return reason
    return ""


def _why_not_group(group: Any) -> str:
    if not _is_sharded(group.mesh_info):
        return "parameters are replicated only"
    if group._training_state.name != "IDLE" or group._sharded_state.name != "SHARDED":
        return "parameters are gathered already"
    if group._partial_reduce_output is not None:
        return "gradients are reduced in part (set_requires_all_reduce)"
    if group._post_reduce_event is not None:
        return "an exchange of an earlier backward has not ended (set_is_last_backward)"
    custom = type(group._all_gather_comm).__name__ != "DefaultAllGather"
    custom = custom or type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter"
    if custom or group._all_reduce_hook is not None or group.gradient_divide_factor is not None:
        return "exchanges are of the program's own (communication, hook, factor)"
    if getattr(group, "reduce_scatter_unused_params", False) or group.force_sum_reduction_for_comms:
        return "exchanges are of the program's own (unused parameters, sums)"
    if getattr(group.mesh_info, "reduce_scatter_process_group", None) is not None:
        return "gradients have a process group of their own"
    for param in group.fsdp_params:
        if param.sharded_size[1:] != param._orig_size[1:] or getattr(param, "_extensions_data", None) is not None:
            return "parameters are cut or gathered in a way of their own"
        if param.offload_to_cpu and group.device.type != "cpu":
            return "parameters are kept on the CPU"
        whole = getattr(param, "_unsharded_param", None)
        if whole is not None and whole.grad is not None:
            return "gradients of earlier calls have not been reduced"
    return ""


def _is_sharded(info: Any) -> bool:
    return type(info).__name__ in ("FSDPMeshInfo", "HSDPMeshInfo")


def _factors(dtype: torch.dtype, size: int) -> tuple[float, float] | None:
    """By what gradients are divided before and after they are summed up; None: they are averaged."""
    if dtype in (torch.float32, torch.bfloat16):
        return None
    first = 1
    while size % first == 0 and size / first > first:
        first *= 2
    return first, size / first


def parameters_of(state: Any) -> Iterator[tuple[Any, Any, list[tuple[Any, str]], tuple[Any, ...]]]:
    """Interpreted: each parameter as FSDP has it, with its group, where modules have it under which names, and how it is spread.

    The last is the process group, the one of ranks with the same part, the size of the first, whether the parameter is freed
    after the forward, its rows here, here with those that fill it up, and in all, the dtypes in which it is used and reduced, the
    factors by which gradients are divided, and the size of the second group.
    """
    for group in groups_of(state):
        info, again = group.mesh_info, group.post_forward_mesh_info is not None
        is_copied = info.replicate_mesh_dim is not None
        others, copies = (info.replicate_process_group, info.replicate_mesh_size) if is_copied else (None, 1)
        for param in group.fsdp_params:
            names, rows = param._module_info, param.sharded_size[0]
            padded, whole = param.padded_sharded_param_size[0], param._orig_size[0]
            owners = [
                (names.module, names.param_name),
                *zip(names.shared_modules, names.shared_param_names, strict=True),
            ]
            dtypes = param.param_dtype, param.reduce_dtype
            factors = _factors(
                param.reduce_dtype or param.param_dtype or param.orig_dtype, info.shard_mesh_size * copies
            )
            sizes = info.shard_mesh_size, again, rows, padded, whole
            yield group, param, owners, (info.shard_process_group, others, *sizes, *dtypes, factors, copies)


def context_of(state: Any) -> int:
    """The same number for all modules under one outermost module."""
    return id(state._state_ctx)


def _is_kept_by_fsdp() -> bool:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return not isinstance(vars(FSDPParam).get("unsharded_accumulated_grad"), property)


#: Whether FSDP has a place of its own for whole gradients that no backward has reduced; from torch 2.15 on they stay in the
#: ``.grad`` of the whole parameter, in a dtype that changes from backward to backward.
KEEPS_GRADIENTS = not torch.distributed.is_available() or _is_kept_by_fsdp()


def kept_gradient(param: Any) -> Any:
    """Interpreted: the whole gradient of earlier backwards that have not reduced it, or None."""
    return param.unsharded_accumulated_grad if KEEPS_GRADIENTS else None


def keep_gradient(param: Any, value: Any) -> None:
    """Interpreted: set it."""
    param.unsharded_accumulated_grad = value


def beside_tensor_parallelism(param: Any, whole: torch.Tensor) -> Any:
    """The ``DTensor`` that a parameter was before FSDP had it, around the part that tensor parallelism gives this rank."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import _from_local_no_grad

    return _from_local_no_grad(whole, param._unsharded_param._spec)


def own_gradient(param: Any, gradient: torch.Tensor) -> Any:
    """The part of such a parameter's gradient that FSDP reduces: of sums that are in parts this rank's share."""
    return param._get_grad_inner_tensor(gradient)


def _all_of(state: Any) -> list[tuple[Any, Any]]:
    groups = [group for item in state._state_ctx.all_states for group in groups_of(item)]
    return [(group, param) for group in groups for param in group.fsdp_params]


def _is_kept(param: Any) -> bool:
    whole = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def kept_gradients(state: Any) -> list[tuple[Any, Any]]:
    """The parameters under the outermost module that have such a gradient, each behind its group."""
    return [item for item in _all_of(state) if _is_kept(item[1])]


def places_of_kept(state: Any) -> tuple[int, ...]:
    """The places of these among all parameters."""
    return tuple(place for place, (_, param) in enumerate(_all_of(state)) if _is_kept(param))


def state_of(module: torch.nn.Module) -> Any:
    """FSDP's state of a module, None for one that it has not been given."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    return _get_module_fsdp_state(module)


def is_hook(function: Any) -> bool:
    """Whether a hook is a method of what FSDP keeps of a module."""
    return isinstance(getattr(function, "__self__", None), state_class())


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


class _NoExchange:
    """In the place of a group of parameters, whose gradients the graph exchanges."""

    def post_backward(self) -> None:
        """FSDP exchanges them here."""


def join_inputs(group: Any, args: Any, kwargs: Any) -> Any:
    """Interpreted: the arguments behind FSDP's node of autograd, where gradients of what a module is given are added up."""
    return type(group)._register_post_backward_hook(_NoExchange(), args, kwargs)


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
