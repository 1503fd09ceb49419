"""The door to torch's private names for recordings (CUDA graphs).

Checked on torch 2.13 (CPU). What is private elsewhere comes through :mod:`dovetail.torch_private.tensors`.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import (
    get_proxy_slot,
    set_proxy_slot,
)
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._thunk import Thunk

from dovetail.torch_private.sizes import is_symbolic


def storage_users(value: torch.Tensor) -> int:
    """How many references to the memory of this tensor there are, on the C++ side too (saved for a backward, say)."""
    return int(torch._C._storage_Use_Count(value.untyped_storage()._cdata))


def is_implicit(overload: OpOverload) -> bool:
    """Whether autograd sees the operator as a program of others, such as ``reshape``, which may return a view or not."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def storage_key(storage: torch.UntypedStorage) -> int:
    """What two Python objects for the same memory, fake or real, have in common while it lives."""
    return int(storage._cdata)


def end_capture_allocations(device: torch.device, pool: Any) -> None:
    """Have the allocator end what a failed capture may have left begun; nothing happens if it was ended."""
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:
        return


def last_line_of_generated_code(error: BaseException | None) -> str:
    """The operator and the user's line in the innermost frame of code that Dovetail has generated; may be empty.

    Errors that this one came after are looked at too: the end of a failed capture raises an error of its own.
    """
    found = ""
    while error is not None and not found:
        traceback = error.__traceback__
        while traceback is not None:
            name = traceback.tb_frame.f_code.co_filename
            if name.startswith("<dovetail"):
                found = linecache.getline(name, traceback.tb_lineno).strip().partition("# ")[2]
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__
    return found


def same_wrapper_form(left: Any, right: Any) -> bool:
    """Whether what two wrappers say of themselves agrees, but for DTensor's record of sizes."""
    if type(left) is tuple and len(left) == 4:
        return bool((left[0], left[2]) == (right[0], right[2]))
    return bool(left == right)


def storage_of(value: torch.Tensor) -> int:
    """A number that tensors in the same memory share."""
    return int(value.untyped_storage()._cdata)


def recorded_number(function: Callable[..., Any], arguments: tuple[Any, ...], tracer: Any) -> torch.SymFloat:
    """A Python function of numbers that gives a float, recorded as one node; its result is a new symbol, so that what is
    computed from it is recorded step by step and never simplified together with it. Torch 2.13.
    """
    symbolic = [item for item in arguments if is_symbolic(item)]
    proxies = tuple(get_proxy_slot(item, tracer).force() if is_symbolic(item) else item for item in arguments)  # type: ignore[call-overload]
    proxy = tracer.create_proxy("call_function", function, proxies, {})
    environment = symbolic[0].node.shape_env
    with environment.ignore_fresh_unbacked_symbols():
        fresh = environment.create_unbacked_symfloat()
    proxy.node.meta["val"] = fresh
    set_proxy_slot(fresh, tracer, Thunk(lambda: proxy))
    return fresh  # type: ignore[no-any-return]


_DISABLED: types.CodeType = next(
    item
    for item in torch._compile._disable_dynamo.__code__.co_consts
    if isinstance(item, types.CodeType) and item.co_name == "inner"
)


def without_dynamo_guard(function: types.FunctionType) -> types.FunctionType:
    """What torch keeps out of its own compiler by a wrapper that notes so on the function; any other function is itself."""
    return function.__wrapped__ if function.__code__ is _DISABLED else function  # type: ignore[attr-defined, no-any-return]


def without_torch_compile(function: Any) -> Any:
    """What ``torch.compile`` or ``torch.compiler.disable`` was given, of what they returned; anything else is itself.

    A wrapper of theirs switches torch's compiler on or off for the thread that calls it: under a trace of ours, for good.

    >>> function = lambda x: x * 2
    >>> without_torch_compile(torch.compile(function)) is function, without_torch_compile(function) is function
    (True, True)
    """
    # Imported only where somebody uses it: the import takes a second.
    wrappers = sys.modules.get("torch._dynamo.eval_frame")
    if wrappers is None:
        return function
    if isinstance(function, wrappers.OptimizedModule):
        return function._orig_mod
    is_theirs = isinstance(function, types.FunctionType) and function.__module__ is not None
    if is_theirs and function.__globals__.get("__name__") == "torch._dynamo.eval_frame":
        return getattr(function, "_torchdynamo_orig_callable", function)
    return function


def functional_form(operator: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that returns what this one writes to its first argument; None where there is none (torch 2.13).

    >>> functional_form(torch.ops.aten.clamp_min_.default)
    <OpOverload(op='aten.clamp_min', overload='default')>
    """
    namespace, name = operator._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__") or torch.Tag.inplace_view in operator.tags:
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, operator._overloadname, None)


_PLAIN_SIZES = ("expected to contain only concrete integers", "Cannot call sizes() on tensor with symbolic sizes")


def asks_for_plain_sizes(error: RuntimeError) -> bool:
    """Whether C++ has refused a tensor because its sizes are symbolic (the texts of torch 2.13)."""
    return any(text in str(error) for text in _PLAIN_SIZES)


def is_graph_module_call(module: torch.nn.Module, caller: Any) -> bool:
    """Whether a call of this graph module is nothing but ``torch.nn.Module.__call__`` with better tracebacks (torch 2.13)."""
    if (
        not isinstance(module, torch.fx.GraphModule)
        or getattr(caller, "__qualname__", "").split(".")[-1] != "call_wrapped"
    ):
        return False
    wrapped = getattr(type(module), "_wrapped_call", None)
    return wrapped is None or getattr(wrapped, "cls_call", None) is None


def node_of_number(value: Any, tracer: Any) -> torch.fx.Node | None:
    """The node that computes a symbolic number or truth value; None where the tracer did not see it made. Torch 2.13."""
    slot = get_proxy_slot(value, tracer, None)
    return None if slot is None else slot.force().node  # type: ignore[no-any-return]


scaled_optimizer_step: Callable[..., Any] = torch.amp.GradScaler._maybe_opt_step
"""What a ``GradScaler`` calls to take a step, or to leave it out where a gradient is not finite. Torch 2.11 to 2.13."""


_METADATA_DEPTH = 12


def is_for_node_metadata(frame: types.FrameType | None) -> bool:
    """Whether a size is compared only to note a memory format beside a node, which nothing reads. Torch 2.13.

    Recording a slice of a window would guard on the window being all of the tensor, say.
    """
    for _ in range(_METADATA_DEPTH):
        if frame is None:
            return False
        if frame.f_code is _extract_tensor_metadata.__code__:
            return True
        frame = frame.f_back
    return False


class QuickShapeEnv(ShapeEnv):
    """A shape environment that does not look for the user's frame at each symbol and guard: under an interpreter there is none
    on Python's stack, and the search took 4 % of the capture of an optimizer's step. Torch 2.13.
    """

    def _get_user_frame(self) -> types.FrameType | None:
        return sys._getframe(1)
