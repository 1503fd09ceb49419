"""Custom and higher-order operators, views below autograd, memory, what classes override."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator, OpOverload, _higher_order_ops
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from dovetail.versions import parse

#: The modules whose functions register operators and kernels of them, but for the objects that stand for an operator.
REGISTERING = ("torch.library", "torch._library.custom_ops", "torch._custom_ops", "torch._custom_op.impl")
#: The module whose functions (``make_fx`` and what it returns) trace a program of their own.
TRACING = "torch.fx.experimental.proxy_tensor"
#: Functions that wrap tensors for a functionalisation of the program's own, or act on such tensors.
FUNCTIONALIZING = (
    *(getattr(torch, name) for name in dir(torch) if name.startswith("_functionalize_")),
    *(torch._to_functional_tensor, torch._from_functional_tensor, torch._freeze_functional_tensor),
    *(torch._enable_functionalization, torch._disable_functionalization),
    *(FunctionalTensorMode, FunctionalTensor.to_functional),
)
#: Modules whose Python code reads and sets parameters, walks containers or decorates functions of the program.
READS_THE_PROGRAM = (
    *("torch.nn.utils._named_member_accessor", "torch._functorch.functional_call", "torch.utils._pytree"),
    "torch.utils._device",
)

enter_function_mode: Callable[[Any], None] = torch.overrides._push_mode


def is_implicit(overload: OpOverload) -> bool:
    """Whether autograd sees the operator as a program of others, such as ``reshape``, which may return a view or not."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def is_recorded_inside(overload: OpOverload) -> bool:
    """Whether autograd has no kernel for the operator and records what its kernel, written in Python, does instead."""
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, overload.name()
    if any(has_kernel(name, key) for key in ("Autograd", "AutogradCPU", "AutogradCUDA")):
        return False
    path = name.replace("::", "/")
    return any(f"{path}/{key}" in torch.library._impls for key in ("CompositeExplicitAutograd", "CPU", "CUDA"))


def higher_order_operators() -> Iterable[HigherOrderOperator]:
    """The operators that are defined so far."""
    return _higher_order_ops.values()


def functional_rule(operator: HigherOrderOperator) -> Callable[..., Any] | None:
    """The treatment of functional tensors by the operator, called with the mode."""
    return operator.python_key_table.get(FunctionalTensorMode)  # type: ignore[arg-type, no-any-return, unused-ignore]


def fake_rule(operator: HigherOrderOperator) -> Callable[..., Any] | None:
    """The treatment of fake tensors by the operator, called with the mode; None where the mode's own dispatch knows."""
    known: Any = registered_hop_fake_fns
    if operator in known:
        return None
    return operator.python_key_table.get(FakeTensorMode)  # type: ignore[arg-type, no-any-return, unused-ignore]


def as_view_of(base: torch.Tensor, overload: OpOverload) -> contextlib.ExitStack:
    """A block in which this view operator gives what it gives below autograd: an inference tensor where its base is one."""
    stack = contextlib.ExitStack()
    tracks_views = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "ADInplaceOrView")
    if is_implicit(overload) and not tracks_views:
        # The operators that it is made of track views, which the dispatch of the whole has left out.
        stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False))
        return stack
    stack.enter_context(torch.inference_mode(base.is_inference()))
    stack.enter_context(torch._C._AutoDispatchBelowADInplaceOrView())
    return stack


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """A block in which new tensors count writes; gradients are recorded in it only where they are outside."""
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that two Python objects for the same memory, fake or real, share while the memory lives."""
    return int(storage._cdata)


def overrides_functions(kind: type) -> bool:
    """Whether a class handles torch functions itself (``__torch_function__``), whatever modes there are."""
    implementation = getattr(kind, "__torch_function__", None)
    return kind is not torch.Tensor and implementation not in (None, torch._C._disabled_torch_function_impl)


def is_plain_inside(kind: Any) -> bool:
    """Whether tensors of a class of the user's are plain ones below ``__torch_function__``."""
    return (
        issubclass(kind, torch.Tensor)
        and kind.__module__.split(".", 1)[0] != "torch"
        and kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        and not hasattr(kind, "__tensor_flatten__")
    )


def loop_operators() -> tuple[HigherOrderOperator, HigherOrderOperator, HigherOrderOperator]:
    """The operators of ``map``, ``scan`` and ``while_loop``."""
    from torch._higher_order_ops.map import map_impl
    from torch._higher_order_ops.scan import scan_op
    from torch._higher_order_ops.while_loop import while_loop_op

    return map_impl, scan_op, while_loop_op


def loop_functions() -> tuple[Any, Any, Any]:
    """The functions that check and flatten what these operators are given."""
    from torch._higher_order_ops.map import map as mapped
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    return mapped, scan, while_loop


#: Whether the gradients of ``scan`` are those of the loop; before, what a round returns and hands on counts otherwise.
DIFFERENTIATES_SCANS = parse(torch.__version__) >= (2, 13)


def compiling_functions() -> tuple[Any, Any]:
    """Functions by which torch's control flow hands itself to torch.compile, in eager too: given a function with a tuple of
    arguments (None before torch 2.12), and with its arguments.
    """
    from torch._higher_order_ops import utils

    return getattr(utils, "_hop_compile_and_call", None), utils._maybe_compile_and_run_fn


def flex_attention() -> Any:
    """``flex_attention``."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


#: Modules of torch whose functions call the program's own with what they are given, or look inside.
CALLERS = ("torch._functorch", "torch.utils.checkpoint", "torch._higher_order_ops", "torch.jit", "torch.fx")
#: Questions that torch's own Python functions ask before anything else.
HAS_TORCH_FUNCTION = (
    torch.overrides.has_torch_function,
    torch.overrides.has_torch_function_unary,
    torch.overrides.has_torch_function_variadic,
)
#: Switches off the ``__torch_function__`` of subclasses, not those of modes.
no_subclasses = torch._C.DisableTorchFunctionSubclass
#: Whether subclasses are asked now.
asks_subclasses: Callable[[], bool] = torch._C._is_torch_function_enabled
#: The ``__torch_function__`` of classes that are not asked.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl

#: The method by which a ``GradScaler`` takes an optimizer's step, or skips it where a gradient is not finite.
scaled_optimizer_step: Callable[..., Any] = torch.amp.GradScaler._maybe_opt_step
#: Makes an object of a subclass in the memory of a tensor.
make_subclass: Any = torch.Tensor._make_subclass


def refers_to_weights(code: types.CodeType) -> bool:
    """Whether code is that by which a recurrent network refers to its own weights, weakly (2.13)."""
    own = torch.nn.RNNBase._init_flat_weights.__code__
    # Before Python 3.12, a comprehension has code of its own.
    return code.co_filename == own.co_filename and code.co_qualname.startswith(own.co_qualname)


def overloaded_types(kinds: list[Any]) -> tuple[Any, ...]:
    """The classes of arguments that torch asks for a function, in the order in which it asks."""
    return tuple(torch.overrides._get_overloaded_args(kinds, lambda kind: kind))
