"""Process groups, the operators that exchange tensors between ranks, and the wrappers for data-parallel training."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from dovetail.torch_private.calls import global_module_hooks, hide_from_dynamo

#: Modules whose Python code calls modules of the program.
CALLS_THE_PROGRAM = (
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
)


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


def is_pending(value: object) -> bool:
    """Whether a value is a tensor that an exchange between ranks has yet to bring: eager waits where it is first computed with.

    >>> is_pending(torch.ones(2))
    False
    """
    return type(value) in pending_kinds()


def is_spread(value: object) -> bool:
    """Whether a value is a ``DTensor``: its local part, and where that belongs; nothing that follows from the numbers."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(value) is module.DTensor


@functools.cache
def pending_kinds() -> tuple[type, ...]:
    """The class of tensors that are awaited where they are first computed with, or none in a torch without processes."""
    if not torch.distributed.is_available():
        return ()
    return (importlib.import_module("torch.distributed._functional_collectives").AsyncCollectiveTensor,)


def awaited(value: Any) -> Any:
    """A value, and the plain tensor that it is when the exchange is done if it is pending."""
    return value.trigger_wait() if is_pending(value) else value


def why_not_replicated(model: Any) -> str:
    """Why the forward of this DistributedDataParallel cannot be taken apart, or ""."""
    if model.mixed_precision is not None:
        return "it computes in mixed precision"
    if model._use_python_reducer or model._delay_all_reduce_all_params:
        return "it exchanges gradients in a way of its own"
    if model._comm_hooks:
        return "it has a communication hook"
    if is_joining(model):
        return "it is in a join() block"
    return ""


def is_joining(model: Any) -> bool:
    """Whether ranks that have no more batches take part in this DistributedDataParallel's exchanges, and in no others."""
    return bool(model._join_config.enable)


def syncs_buffers(model: Any) -> bool:
    """Whether this DistributedDataParallel sends the first rank's buffers to all in its next forward.

    Before torch 2.12 the flag has another name.
    """
    wanted = model.forward_sync_buffers if hasattr(model, "forward_sync_buffers") else model.broadcast_buffers
    return bool(wanted) and model.require_forward_param_sync and len(model.modules_buffers) > 0


def before_forward(owner: type, name: str, prepare: Callable[[Any], None]) -> None:
    """Have ``prepare(self)`` called in front of a method of torch's by which a wrapped module's forward begins."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(self)
        return original(self, *args, **kwargs)

    hide_from_dynamo(begin)
    setattr(owner, name, begin)


@functools.cache
def _fsdp_code() -> frozenset[types.CodeType]:
    # Of FSDP2 the wrapper around each of its hooks; of FSDP1 what a wrapped module's forward calls.
    from torch.distributed.fsdp import _runtime_utils
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    names = ("_root_pre_forward", "_pre_forward", "_post_forward")
    parts = (getattr(_runtime_utils, name, None) for name in names)
    return frozenset(part.__code__ for part in (_fsdp_state.FSDPState._pre_forward, *parts) if part is not None)


def is_of_fsdp(function: Any) -> bool:
    """Whether a function is one by which FSDP gathers or frees the parameters of a module, or one that says when it does.

    >>> is_of_fsdp(len)
    False
    """
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return False
    function = getattr(function, "__func__", function)
    is_method = getattr(function, "__module__", None) == "torch.distributed.fsdp._fully_shard._fully_shard"
    return is_method or getattr(function, "__code__", None) in _fsdp_code()


def has_fsdp_hooks(module: Any) -> bool:
    """Whether ``fully_shard`` has put hooks on a module, whose call does nothing else than these and the module's own hooks."""
    attributes = vars(module)
    left_out = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks_always_called")
    return (
        any(map(is_of_fsdp, attributes["_forward_pre_hooks"].values()))
        and not any(attributes[name] for name in left_out)
        and not any(global_module_hooks().values())
    )


def call_between_hooks(module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module as it calls itself, with another ``forward``; ask :func:`has_fsdp_hooks` before."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if key in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            args, kwargs = changed if changed is not None else (args, kwargs)
        else:
            changed = hook(module, args)
            args = args if changed is None else changed if isinstance(changed, tuple) else (changed,)
    result = forward(*args, **kwargs)
    for key, hook in list(module._forward_hooks.items()):
        given = (args, kwargs) if key in module._forward_hooks_with_kwargs else (args,)
        changed = hook(module, *given, result)
        result = result if changed is None else changed
    return result


def exchanged_parameters(model: Any) -> list[torch.Tensor]:
    """The parameters of a DistributedDataParallel in the order in which its reducer numbers them."""
    return list(model._module_parameters)


def remove_native_hooks(model: Any) -> None:
    """Take the reducer's hooks off the parameters of a DistributedDataParallel; the reducer is told from Python instead."""
    model.reducer._remove_autograd_hooks()


def gradient_is_ready(reducer: Any, place: int) -> None:
    """Do what the reducer's native hook of a parameter does."""
    reducer._autograd_hook(place)


def fake_store() -> Any:
    """The store of a process group of the kind "fake", whose exchanges do nothing; importing it registers the kind."""
    return importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


def parallelize(model: torch.nn.Module, mesh: Any, plan: Any) -> torch.nn.Module:
    """``parallelize_module``, which is loaded with all of DTensor when it is called."""
    made: torch.nn.Module = importlib.import_module("torch.distributed.tensor.parallel").parallelize_module(
        model, mesh, plan
    )
    return made
