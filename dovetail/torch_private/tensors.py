"""The main door to torch's private names: one small function or re-export each; ``torch_private_*`` are those for one subject.

Checked on torch 2.13 (CPU) and meant for 2.11 and later; where versions differ, the difference is handled here and nowhere else.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    decompose,
    disable_autocast_cache,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
)
from torch.nested._internal.nested_tensor import NestedTensor as JaggedTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "FakeTensorMode",
    "FunctionalTensorMode",
    "JaggedTensor",
    "OpOverload",
    "OpOverloadPacket",
    "ProxyTorchDispatchMode",
    "PythonKeyTracer",
    "TorchDispatchMode",
    "TreeSpec",
    "decompose",
    "disable_autocast_cache",
    "disable_current_modes",
    "enable_python_dispatcher",
    "from_fun",
    "get_proxy_slot",
    "to_fun",
    "track_tensor_tree",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

DATA_DEPENDENT_ERRORS: tuple[type[BaseException], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def is_functional(value: object) -> bool:
    """Whether a value is a functional wrapper, the outside of a traced tensor."""
    return isinstance(value, FunctionalTensor) or (
        isinstance(value, torch.Tensor) and torch._is_functional_tensor(value)
    )


def is_fake(value: object) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


@contextlib.contextmanager
def compiling_flag() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true; optimizers then keep their step on tensors."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def plain_checkpoints() -> Iterator[None]:
    """In this thread, regions of ``torch.utils.checkpoint`` save and compute again as in eager.

    While something is traced, torch saves all of a selective region and leaves marks for a compiler; and the operator that
    Dynamo makes of a region does not put the random generator back (checked on torch 2.13).
    """
    from torch._higher_order_ops.wrap import TagActivationCheckpoint
    from torch.utils import checkpoint

    module: Any = checkpoint
    operator_class: Any = TagActivationCheckpoint
    owner = threading.get_ident()
    is_compiling = getattr(module, "_is_compiling", None)
    call = operator_class.__call__

    def never(*args: Any, **kwargs: Any) -> bool:
        return threading.get_ident() != owner and is_compiling is not None and is_compiling(*args, **kwargs)

    def as_in_eager(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return call(self, graph, *args, **kwargs)
        kwargs["use_reentrant"] = False
        if "_checkpoint_context_fn" in graph.meta:
            kwargs["context_fn"] = graph.meta["_checkpoint_context_fn"]
        return checkpoint.checkpoint(torch.fx.Interpreter(graph).run, *args, **kwargs)

    module._is_compiling = never
    operator_class.__call__ = as_in_eager
    try:
        yield
    finally:
        operator_class.__call__ = call
        if is_compiling is not None:
            module._is_compiling = is_compiling


def autograd_sequence_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return torch._C._autograd._get_sequence_nr()


def running_autograd_node() -> Any:
    """The autograd node that the engine evaluates right now in this thread, or None."""
    return torch._C._current_autograd_node()


class LineTable:
    """Which user line was running when an autograd node was made: an ordered table of sequence numbers."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._lines: list[Any] = []

    def add(self, start: int, line: Any) -> None:
        """From sequence number ``start`` on, nodes belong to ``line``."""
        if self._starts and self._starts[-1] == start:
            self._lines[-1] = line
        else:
            self._starts.append(start)
            self._lines.append(line)

    def find(self, number: int) -> Any:
        """The line of the node with this sequence number, or None."""
        position = bisect.bisect_right(self._starts, number) - 1
        return self._lines[position] if position >= 0 else None


def global_module_hooks() -> dict[str, Any]:
    """The dictionaries of hooks that run on every module, by name."""
    from torch.nn.modules import module

    return {
        name: getattr(module, name)
        for name in (
            "_global_backward_pre_hooks",
            "_global_backward_hooks",
            "_global_forward_pre_hooks",
            "_global_forward_hooks",
        )
    }


def is_tracing() -> bool:
    """Whether a dispatch mode that traces (fake, functional, proxy) is active in this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


@contextlib.contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Put back the state of the default generators after the block, so that tracing draws no random numbers."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


# Below the first nothing is recorded by autograd, but views still share version counters; below the second nothing is
# cast by autocast. As they are, since a Python context manager around them costs 1 us more on every call.
BelowAutograd = torch._C._AutoDispatchBelowAutograd

NoAutocast = torch._C._DisableAutocast


def operator_entry(overload: OpOverload) -> Any:
    """The bound C++ entry of an operator overload; calling it saves one Python frame per operator."""
    return overload._op


def is_tensor_view(value: torch.Tensor) -> bool:
    """Whether autograd treats this tensor as a differentiable view of another one."""
    return value._is_view()


def is_composite(overload: OpOverload) -> bool:
    """Whether the operator has a kernel made of other operators, whose results may be views unknown to its schema."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(
        has_kernel(overload.name(), f"Composite{kind}")
        for kind in ("ImplicitAutograd", "ExplicitAutograd", "ExplicitAutogradNonFunctional")
    )


def torch_backend_names() -> list[str]:
    """Names of the backends registered with torch itself, debugging ones included."""
    import torch._dynamo

    return list(torch._dynamo.list_backends(None))


def torch_backend(name: str) -> Any:
    """One of torch's own registered backends, a callable ``(graph_module, example_inputs)``."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


@contextlib.contextmanager
def tracing_context(fake_mode: Any) -> Iterator[None]:
    """Make ``fake_mode`` the one that torch's compilers find while the block runs."""
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(fake_mode)):
        yield


def inductor_decompositions() -> dict[Any, Any]:
    """Inductor's table of decompositions, for graphs that draw random numbers as eager does."""
    # That of max_pool2d takes the lowerings for imported.
    from torch._inductor import (
        config,
        lowering,  # noqa: F401
    )
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        return dict(select_decomp_table())


def inductor_compile(
    graph: torch.fx.GraphModule,
    example_inputs: list[Any],
    fake_mode: Any,
    *,
    static_inputs: list[int],
    user_visible_outputs: list[int],
    is_backward: bool,
    is_inference: bool,
    settings: dict[str, Any],
) -> Any:
    """Compile one flat ATen graph, which is changed on the way, with Inductor; the result takes one list of inputs."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    # Inductor keeps the strides that the fake values promise for these outputs only.
    output.meta["user_visible_output_idxs"] = user_visible_outputs
    with config.patch(settings), tracing_context(fake_mode), V.set_fake_mode(fake_mode):
        return compile_fx_inner(
            graph,
            example_inputs,
            static_input_idxs=static_inputs,
            is_backward=is_backward,
            is_inference=is_inference,
        )


def inductor_realize() -> Any:
    """An operator that gives its argument, which Inductor then keeps in memory; None where there is none (torch 2.13 has it)."""
    try:
        from torch._inductor import lowering, test_operators  # noqa: F401  (both register the operator)
    except ImportError:
        return None
    return torch.ops._inductor_test.realize.default


def inductor_setting_names() -> set[str]:
    """Names of Inductor's own settings."""
    from torch._inductor import config

    return set(config.get_config_copy())


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use on this machine, or None."""
    import os
    import shutil

    names = [os.environ.get("CXX"), "g++", "clang++", "g++-13", "g++-12", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def has_triton() -> bool:
    """Whether there is a CUDA device and a Triton that can compile for it."""
    from torch.utils._triton import has_triton as torch_has_triton

    return torch.cuda.is_available() and torch_has_triton()


def is_traced(value: torch.Tensor) -> bool:
    """Whether a tensor is of a trace's own making: a functional wrapper, or one of functorch's around such a wrapper."""
    return (
        isinstance(value, FunctionalTensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(value)
        or is_traced_wrapper(value)
    )


def bulk_tensor_check(
    tensors: list[torch.Tensor], sizes: list[list[int | None]], strides: list[list[int | None]]
) -> Callable[..., bool]:
    """A C++ ``check(*tensors)``: the tensors have the same type, keys, dtype, device and requires_grad, and the given sizes
    and strides (None: any).

    Only for dense tensors: the constructor crashes on sparse ones. It refuses a tensor that comes twice among tensors
    that were distinct, see :func:`bulk_check_sees_duplicates`.
    """
    guard = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=sizes,  # type: ignore[misc, arg-type]
        dynamic_dims_strides=strides,  # type: ignore[misc, arg-type]
    )
    return guard.check


@functools.cache
def bulk_check_sees_duplicates() -> bool:
    """Whether this torch's bulk check refuses one tensor in two places (true on 2.13)."""
    first, second = torch.zeros(1), torch.zeros(1)
    check = bulk_tensor_check([first, second], [[1], [1]], [[1], [1]])
    return check(first, second) and not check(first, first)


def dispatch_keys(tensor: torch.Tensor) -> str:
    """The dispatch keys of a tensor, as text."""
    return str(torch._C._dispatch_keys(tensor))


def global_state_check() -> Callable[[], bool]:
    """A C++ check that grad mode, autocast, default dtype, deterministic flags, TF32, thread count are as now."""
    return torch._C._dynamo.guards.GlobalStateGuard().check


function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack

dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack

functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def function_modes() -> list[Any]:
    """The active torch-function modes, outermost first."""
    return [torch._C._get_function_stack_at(index) for index in range(function_mode_count())]


def dispatch_modes() -> list[Any]:
    """The active torch-dispatch modes, those of tracing (fake, proxy, functional) included."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def is_tracing_mode(mode: object) -> bool:
    """Whether a dispatch mode is one of those that an open trace is made of."""
    return isinstance(mode, (FunctionalTensorMode, ProxyTorchDispatchMode, FakeTensorMode))


def function_mode_device(mode: object) -> torch.device | None:
    """The device of the mode behind ``torch.set_default_device`` and ``with device:``; None for another mode."""
    from torch.utils._device import DeviceContext

    return mode.device if isinstance(mode, DeviceContext) else None


def saved_tensor_hooks() -> Any:
    """The innermost default hooks for saved tensors, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def torch_function_switches() -> tuple[bool, bool]:
    """Whether ``__torch_function__`` is enabled, and whether subclasses and modes are all disabled."""
    return torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()


def forward_ad_level() -> int:
    """The level of forward-mode differentiation; -1 outside of it."""
    return torch.autograd.forward_ad._current_level


def is_jit_tracing() -> bool:
    """Whether ``torch.jit.trace`` is running."""
    return torch._C._get_tracing_state() is not None


def kernel_flags(
    read: tuple[Callable[[], Any], ...] = (
        torch._C._get_flash_sdp_enabled,
        torch._C._get_mem_efficient_sdp_enabled,
        torch._C._get_math_sdp_enabled,
        torch._C._get_cudnn_sdp_enabled,
        torch._C._get_cudnn_enabled,
        torch._C._get_cudnn_benchmark,
        torch._C._get_cudnn_deterministic,
        torch._C._get_cudnn_allow_tf32,
        torch._C._get_mkldnn_enabled,
        torch._C._get_float32_matmul_precision,
        torch._C._get_deterministic_fill_uninitialized_memory,
        functools.partial(torch._C._get_fp32_precision_getter, "cuda", "all"),
    ),
) -> tuple[Any, ...]:
    """The switches that choose kernels, in the order of :data:`KERNEL_FLAG_NAMES`."""
    return tuple([one() for one in read])


def set_kernel_flags(old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    """Set those of the switches that differ between two results of :func:`kernel_flags`."""
    setters: tuple[Callable[[Any], Any], ...] = (
        torch._C._set_sdp_use_flash,
        torch._C._set_sdp_use_mem_efficient,
        torch._C._set_sdp_use_math,
        torch._C._set_sdp_use_cudnn,
        torch._C._set_cudnn_enabled,
        torch._C._set_cudnn_benchmark,
        torch._C._set_cudnn_deterministic,
        torch._C._set_cudnn_allow_tf32,
        torch._C._set_mkldnn_enabled,
        torch._C._set_float32_matmul_precision,
        torch._C._set_deterministic_fill_uninitialized_memory,
        functools.partial(torch._C._set_fp32_precision_setter, "cuda", "all"),
    )
    for setter, before, after in zip(setters, old, new, strict=True):
        if before != after:
            setter(after)


KERNEL_FLAG_NAMES = (
    "flash attention",
    "memory-efficient attention",
    "math attention",
    "cuDNN attention",
    "cuDNN",
    "cuDNN benchmark",
    "cuDNN deterministic",
    "cuDNN TF32",
    "MKLDNN",
    "float32 matmul precision",
    "filling of uninitialized memory",
    "float32 precision on CUDA",
)


def is_functorch_wrapped(value: torch.Tensor) -> bool:
    """Whether a tensor is one of functorch's wrappers (inside vmap, grad, jvp)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


@contextlib.contextmanager
def effects_as_plain_operators() -> Iterator[None]:
    """Record operators with an ordered effect (``_linalg_check_errors``) as plain nodes, without effect tokens."""
    from torch._higher_order_ops import effects

    original = effects.has_effects
    from torch._subclasses import functional_tensor as functional

    def no_effects(op: Any) -> bool:
        return False if getattr(op, "namespace", "") == "aten" else bool(original(op))

    patched = [module for module in (effects, functional) if hasattr(module, "has_effects")]
    for module in patched:
        module.has_effects = no_effects
    try:
        yield
    finally:
        for module in patched:
            module.has_effects = original


def view_replay(view: torch.Tensor) -> Any:
    """The view operators between a tensor and its base, as a function of another base; and of another way to read each size
    in it, given as a second argument.
    """
    return view._view_func_unsafe


def is_recorded_view(view: torch.Tensor) -> bool:
    """Whether a tensor is a view that was made with gradients enabled: a write to it is recorded on its base too."""
    if view._base is None:
        return False
    autograd: Any = torch._C._autograd
    return bool(autograd._get_creation_meta(view) == autograd.CreationMeta.DEFAULT)


def is_view_of_custom_function(view: torch.Tensor) -> bool:
    """Whether a custom ``autograd.Function`` returned this view: its backward is not that of the view operators."""
    if view._base is None or view.grad_fn is None:
        return False
    autograd: Any = torch._C._autograd
    return bool(autograd._get_creation_meta(view) == autograd.CreationMeta.IN_CUSTOM_FUNCTION)


TensorBase = torch._C.TensorBase


def module_call_with_hooks() -> Any:
    """The Python function that runs a module's hooks around its forward."""
    return torch.nn.Module._call_impl


def mark_native(error: BaseException) -> None:
    """Note on an exception that a tensor operation raised it, not the user's own code."""
    error._dovetail_native = True  # type: ignore[attr-defined]


def is_unhashable_number(error: BaseException) -> bool:
    """Whether an error says that a symbolic number has no hash (torch 2.11 to 2.13)."""
    return isinstance(error, TypeError) and "unhashable type: " in str(error) and "Sym" in str(error)


def is_marked_native(error: BaseException) -> bool:
    """Whether :func:`mark_native` was called on an exception."""
    return bool(getattr(error, "_dovetail_native", False))


def mark_independent(error: BaseException) -> None:
    """Note on an exception that a call without any argument raised it: no tensor and no size is what it comes of."""
    error._dovetail_independent = True  # type: ignore[attr-defined]


def is_marked_independent(error: BaseException) -> bool:
    """Whether :func:`mark_independent` was called on an exception."""
    return bool(getattr(error, "_dovetail_independent", False))


def no_torch_function() -> Any:
    """A context in which no ``__torch_function__`` is called, neither a mode's nor a subclass's."""
    return torch._C.DisableTorchFunction()


def lazy_graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A graph module that generates its Python code when it is first run; most captured graphs never are."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        module: torch.fx.GraphModule = _make_graph_module(root, graph)
    return module


def aot_backend(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A backend for torch.compile: AOTAutograd, with one compiler for the forward and the backward graph."""
    from torch._dynamo.backends.common import aot_autograd

    backend: Callable[..., Any] = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    return backend


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without the walk over all arguments that looks for dead wrappers of functorch.

    The walk takes 150 us for 757 arguments, nearly half of the whole. Not for use while a functorch transform is active.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def is_wrapper(value: object) -> bool:
    """Whether a tensor is of a subclass that wraps strided tensors and can be taken apart (``__tensor_flatten__``)."""
    return (
        is_traceable_wrapper_subclass(value)
        and not isinstance(value, FunctionalTensor)
        and value.layout is torch.strided
    )


def is_traced_wrapper(value: object) -> bool:
    """Whether a wrapper holds traced tensors."""
    if type(value) is torch.Tensor or not is_wrapper(value):
        return False
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    try:
        inner = [getattr(value, name) for name in names]
    except AttributeError:
        # Its ``__new__`` is running, in the trace.
        return True
    return any(isinstance(item, torch.Tensor) and is_traced(item) for item in inner)
