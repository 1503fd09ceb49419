"""The only door to torch's private names: one small function or re-export each.

Checked on torch 2.13 (CPU) and meant for 2.11 and later; where versions differ, the difference is handled here and nowhere else.
"""

from __future__ import annotations


# --- trace ------------------------------------------------------------------------------------------------------------
import functools  # noqa: E402
import itertools  # noqa: E402
import linecache  # noqa: E402
import bisect  # noqa: E402
import contextlib  # noqa: E402
import threading  # noqa: E402
import dataclasses  # noqa: E402
from collections.abc import Iterator, Mapping, Set  # noqa: E402
from typing import Any  # noqa: E402

import math  # noqa: E402
import operator  # noqa: E402
import sys  # noqa: E402
import types  # noqa: E402

import sympy  # type: ignore[import-untyped]  # noqa: E402
import torch  # noqa: E402
from torch._dispatch.python import enable_python_dispatcher  # noqa: E402
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch._subclasses.fake_tensor import (  # noqa: E402
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import (  # noqa: E402
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    decompose,
    disable_autocast_cache,
    get_proxy_slot,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import (  # noqa: E402
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
    SymT,
    symbol_is_type,
)
from torch.utils._thunk import Thunk  # noqa: E402
from torch.utils._sympy.numbers import int_oo  # noqa: E402
from torch.utils._sympy.printers import PythonPrinter  # noqa: E402
from torch.utils._sympy.value_ranges import ValueRanges  # noqa: E402
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes  # noqa: E402
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # noqa: E402

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


from torch._ops import OpOverload, OpOverloadPacket  # noqa: E402, F401


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


# --- backends ---------------------------------------------------------------------------------------------------------


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


# --- torch.compile's own counters, for the demo ------------------------------------------------------------------------


def dynamo_capture_seconds() -> float:
    """Seconds that torch.compile has spent so far from bytecode to backend-ready graphs, Inductor's own work excluded."""
    from torch._dynamo.utils import compilation_time_metrics as metrics

    def total(name: str) -> float:
        return float(sum(metrics.get(name, ())))

    seconds = total("_compile.compile_inner") - total("compile_fx.<locals>.fw_compiler_base")
    if "backward._backward_impl" not in metrics:  # else the backward was compiled later, outside compile_inner
        seconds -= total("compile_fx.<locals>.bw_compiler")
    return seconds


def dynamo_graph_breaks() -> int:
    """How many graph breaks torch.compile has counted so far in this process."""
    from torch._dynamo.utils import counters

    return int(sum(counters["graph_break"].values()))


def is_traced(value: torch.Tensor) -> bool:
    """Whether a tensor is of a trace's own making: a functional wrapper, or one of functorch's around such a wrapper."""
    return (
        isinstance(value, FunctionalTensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(value)
        or is_traced_wrapper(value)
    )


def inductor_runs_as_is(overload: OpOverload) -> None:
    """Let Inductor call this operator's own kernel where it would otherwise insist on having it decomposed."""
    from torch._inductor import lowering

    if overload not in lowering.lowerings:
        lowering.make_fallback(overload, warn=False, override_decomp=True)


# --- guards -----------------------------------------------------------------------------------------------------------
from collections.abc import Callable, Sequence  # noqa: E402


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
    ),
) -> tuple[Any, ...]:
    """The switches that choose kernels, in the order of :data:`KERNEL_FLAG_NAMES`."""
    return tuple([one() for one in read])


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


def no_torch_function() -> Any:
    """A context in which no ``__torch_function__`` is called, neither a mode's nor a subclass's."""
    return torch._C.DisableTorchFunction()


def lazy_graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A graph module that generates its Python code when it is first run; most captured graphs never are."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        module: torch.fx.GraphModule = _make_graph_module(root, graph)
    return module


# --- symbolic sizes ---------------------------------------------------------------------------------------------------


def is_symbolic(value: object) -> bool:
    """Whether a number of a fake tensor is no plain Python number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def has_symbols(value: object) -> bool:
    """Whether a fake tensor's size, strides or offset are symbolic."""
    if isinstance(value, torch.Tensor):
        return any(map(is_symbolic, (*value.shape, *value.stride(), value.storage_offset())))
    return is_symbolic(value)


def hint(value: Any) -> int:
    """The number that a size had at capture, or a guess where only the data decides; nothing is guarded."""
    if not is_symbolic(value):
        return int(value)
    if value.node.has_hint():
        return int(value.node.hint)
    environment, expression = value.node.shape_env, value.node.expr
    # Its name since torch 2.12 or 2.13.
    known = environment.backed_var_to_val if hasattr(environment, "backed_var_to_val") else environment.var_to_val
    return int(expression.xreplace({symbol: known.get(symbol, 4096) for symbol in expression.free_symbols}))


def expression_of(value: Any) -> Any:
    """The expression of a symbolic number, simplified by what is known by now."""
    return value.node.expr


def first_expression(value: Any) -> Any:
    """The expression of a symbolic number as it was made."""
    return value.node._expr


def is_symbol(expression: Any) -> bool:
    """Whether an expression is one symbol."""
    return isinstance(expression, sympy.Symbol)


def symbols_of(expression: Any) -> list[Any]:
    """The symbols in an expression."""
    return sorted(expression.free_symbols, key=str) if hasattr(expression, "free_symbols") else []


def range_of(environment: ShapeEnv, symbol: Any) -> tuple[int | None, int | None]:
    """The least and the greatest value that a symbol may have; None for no bound."""
    found = environment.var_to_range[symbol]
    bounds = [int(item) if isinstance(item, sympy.Integer) else None for item in (found.lower, found.upper)]
    return bounds[0], bounds[1]


class _TextPrinter(PythonPrinter):
    def __init__(self, variables: Mapping[Any, str]) -> None:
        super().__init__()
        self._variables = variables

    def _print_Symbol(self, expression: Any) -> str:
        return self._variables[expression]

    def _print_Float(self, expression: Any) -> str:
        # Sympy's own text has 15 digits, which is another number.
        return repr(float(expression))


def python_text(expression: Any, variables: Mapping[Any, str]) -> str:
    """An expression as Python, with the text for each of its symbols."""
    return str(_TextPrinter(variables).doprint(expression))


def python_text_globals() -> dict[str, Any]:
    """The names that :func:`python_text` uses."""
    return {"math": math, "torch": torch}


def symbolic_fake(
    mode: FakeTensorMode, real: torch.Tensor, name: str, bounds: Mapping[int, tuple[int | None, int | None]]
) -> torch.Tensor:
    """A fake tensor with symbolic sizes in the dimensions of ``bounds``."""
    sizes = [DimDynamic.DYNAMIC if dim in bounds else DimDynamic.STATIC for dim in range(real.dim())]
    constraints: list[Any] = [None] * real.dim()
    for dim, (low, high) in bounds.items():
        if low is not None or high is not None:
            span = ValueRanges(0 if low is None else low, int_oo if high is None else high)
            constraints[dim] = StrictMinMaxConstraint(vr=span, warn_only=False)
    # At the top it would cost every import of this package two seconds.
    from torch._dynamo.source import ConstantSource

    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=constraints)
    return mode.from_tensor(real, source=ConstantSource(name), symbolic_context=context)


def new_size(environment: ShapeEnv, hint: int, name: str, low: int, high: int | None) -> Any:
    """A symbolic size of its own, which was ``hint`` and lies from ``low`` to ``high`` (checked on torch 2.11 and 2.13)."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    span = ValueRanges(low, int_oo if high is None else high)
    constraint = StrictMinMaxConstraint(vr=span, warn_only=False)
    symbol = environment.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=constraint)
    return environment.create_symintnode(symbol, hint=hint, source=source)


def float_carrier(mode: FakeTensorMode, value: float, name: str) -> torch.Tensor:
    """A fake tensor without dimensions whose value is a symbolic float, with ``value`` as its hint."""
    from torch._dynamo.source import ConstantSource

    environment: Any = mode.shape_env
    source = ConstantSource(name)
    symbol = environment.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    with mode:
        fake = torch.empty((), dtype=torch.float64)
    fake.item_memo = environment.create_symfloatnode(symbol, hint=value, source=source)  # type: ignore[attr-defined]
    return fake


def carried_float(fake: object) -> Any:
    """The symbolic float that :func:`float_carrier` put into a fake tensor, or None."""
    memo = getattr(fake, "item_memo", None)
    return memo if isinstance(memo, torch.SymFloat) and memo.node.hint is not None else None


class KnownSymbols:
    """Which symbols of a shape environment were looked at, and which of them were made out of data."""

    def __init__(self) -> None:
        self.count = 0
        self.found: set[Any] = set()


def data_symbols(environment: ShapeEnv, known: KnownSymbols) -> set[Any]:
    """The symbols of sizes and numbers that were made out of tensors' data; ``known`` are those that were found earlier."""
    symbols = environment.var_to_range
    if len(symbols) < known.count:
        known.count, known.found = 0, set()
    new = itertools.islice(symbols, known.count, None)
    known.found.update(symbol for symbol in new if is_made_of_data(symbol))
    known.count = len(symbols)
    return set(known.found)


@functools.lru_cache(maxsize=1 << 14)
def is_made_of_data(symbol: Any) -> bool:
    """Whether a symbol stands for a number that an operator has made out of a tensor's data."""
    return bool(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def is_made_of_data_float(value: Any) -> bool:
    """Whether a number or truth value depends on a float out of a tensor's data; symbols are simplified as if it were no NaN."""
    return is_symbolic(value) and any(
        symbol_is_type(item, SymT.UNBACKED_FLOAT) for item in value.node.expr.free_symbols
    )


def is_data_number(value: Any) -> bool:
    """Whether a number depends on a tensor's data."""
    return is_symbolic(value) and any(map(is_made_of_data, value.node.expr.free_symbols))


def deferred_assumptions(environment: ShapeEnv, truths: Set[Any] = frozenset()) -> list[Any]:
    """What a shape environment assumed about sizes that are made of data, as expressions; each once. That ``truths`` are 0 or
    1 is no assumption.
    """
    found: dict[Any, None] = {}
    for conditions in environment.deferred_runtime_asserts.values():
        for condition in conditions:
            # A conjunction of three is handed to Python's operator for two (torch 2.13).
            parts = condition.expr.args if isinstance(condition.expr, sympy.And) else (condition.expr,)
            found.update(dict.fromkeys(parts))
    for symbol, interval in environment.var_to_range.items():
        if not is_made_of_data(symbol) or symbol in truths:
            continue
        for bound, expression in (
            (interval.lower, symbol >= interval.lower),
            (interval.upper, symbol <= interval.upper),
        ):
            if bound.is_Integer and abs(int(bound)) < 1 << 62:
                found[expression] = None
    return [expression for expression in found if expression not in (True, False)]


_RELATIONS = {
    sympy.Eq: operator.eq,
    sympy.Ge: operator.ge,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Lt: operator.lt,
}


def parts_of_relation(expression: Any) -> tuple[Any, ...]:
    """The operator and both sides of a relation between symbols and whole numbers; the operator is None for anything else."""
    sides = (int(side) if isinstance(side, sympy.Integer) else side for side in expression.args)
    return (_RELATIONS.get(type(expression)), *sides)


def is_expressible(expression: Any) -> bool:
    """Whether a condition can be recorded: "and" and "or" of more than two parts cannot."""
    return not any(len(part.args) > 2 for part in expression.atoms(sympy.And, sympy.Or))


def symbolic_truth(environment: ShapeEnv, expression: Any) -> torch.SymBool:
    """A condition as a symbolic truth value; nothing is decided by making it."""
    return environment.create_symboolnode(expression)  # type: ignore[no-any-return]


def suggested_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Channels-last for a tensor whose strides are so, else contiguous, as the C++ function of the same name says (2.13)."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)  # type: ignore[arg-type]


def assume(condition: torch.SymBool) -> None:
    """Tell the shape environment that a condition holds; one on data goes into the graph as an assertion (2.11, 2.13)."""
    torch._check(condition)


# --- call overhead ----------------------------------------------------------------------------------------------------


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


# --- torch.compile as the caller --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CallersInput:
    """One input of a graph that torch.compile hands over: the caller's fake value of it, and how the caller writes it."""

    value: Any
    name: str


def callers_name(source: Any) -> str:
    """How the caller writes a source, such as ``L['x']``."""
    if source is None:
        return "an input"
    name = source.name
    return str(name() if callable(name) else name)  # a method before torch 2.12


def callers_fake_mode(inputs: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode of the compiler that calls, or None."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(inputs))


def callers_inputs(graph: torch.fx.GraphModule, inputs: Sequence[Any], fake_mode: FakeTensorMode) -> list[CallersInput]:
    """The inputs as the caller's own fake values, symbols included.

    The placeholders' own values will not do: the caller's trace has been through them, in-place changes of metadata included.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    found = []
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            symbols = context.tensor_to_context.get(value) if context is not None else None
            value = fake_mode.from_tensor(
                value,
                static_shapes=context is None,
                symbolic_context=symbols,
                source=getattr(symbols, "tensor_source", None),
            )
        found.append(CallersInput(value, callers_name(source)))
    return found


def new_fake_mode() -> FakeTensorMode:
    """A fake mode with a shape environment of its own."""
    return FakeTensorMode(shape_env=ShapeEnv())


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any two of these tensors lie in one storage (0.2 us for each)."""
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors)


@contextlib.contextmanager
def symbolic_sizes_in(fake_mode: FakeTensorMode) -> Iterator[None]:
    """C++ operators made of others ask for plain sizes, their Python forms do not: use those, in this fake mode only."""
    original = fake_mode.dispatch

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        with enable_python_dispatcher():
            return original(*args, **kwargs)  # type: ignore[no-untyped-call]

    fake_mode.dispatch = dispatch  # type: ignore[method-assign]
    try:
        yield
    finally:
        del fake_mode.dispatch


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Have torch.compile run a function, and all that it calls, without looking at its code (checked on 2.13).

    The autograd engine calls a backward; in a program that torch.compile has broken into graphs, it would be captured.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """Autograd as for a user's call, from inside of an operator's kernel; autocast stays as it is (torch 2.13)."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set().add(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def saved_value(node: Any, name: str) -> Any:
    """What an autograd node has saved under ``name``; a negative dimension comes back as the number that it is."""
    value = getattr(node, f"_saved_{name}")
    return value - (1 << 64) if type(value) is int and value >= 1 << 63 else value


def is_written(value: torch.Tensor) -> bool:
    """Whether data of a functional tensor, or of a view of it, has been written to."""
    return torch._functionalize_has_data_mutation(value.elem)  # type: ignore[attr-defined,no-any-return]


def make_saved_tensor(value: torch.Tensor) -> Any:
    """What an autograd node keeps of an input: ``unpack()`` gives it with its gradient edge, or eager's error if it was
    written to meanwhile (checked on 2.13). It takes 0.3 us, and makes no cycle when the input itself is written to later.
    """
    return torch._C._autograd._make_saved_tensor(value, False)


def raw_saved_tensors(node: Any) -> Sequence[Any]:
    """What a node of a custom Function has saved: ``unpack()`` of each gives it, or eager's error if it was written to."""
    return node._raw_saved_tensors  # type: ignore[no-any-return]


def keeps_graph() -> bool:
    """Whether the backward that runs now leaves the graph for another one (``retain_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def wanted_edges(edges: Sequence[tuple[Any, int]]) -> tuple[int, ...]:
    """Which of these edges of the autograd graph the backward that runs now will come to (or more than those)."""
    leading = [index for index, (node, _) in enumerate(edges) if node is not None]
    if len(leading) == 1:
        # The node runs because of it.
        return tuple(leading)
    asked = _inputs_of_engine()
    wanted: list[int] = []
    raised = 0
    for index in leading:
        node = edges[index][0]
        if asked and hasattr(node, "variable"):
            # torch raises when it is asked about a leaf that autograd.grad was asked for. That takes 50 us.
            if id(node.variable) in asked or id(node) in asked:
                wanted.append(index)
            continue
        # Not known for a backward on another device, which runs in a thread of its own: from the fifth error on, all leaves
        # count as wanted.
        if raised < 4 or not hasattr(node, "variable"):
            try:
                if not torch._C._will_engine_execute_node(node):  # type: ignore[attr-defined]
                    continue
            except RuntimeError:
                raised += 1
        wanted.append(index)
    return tuple(wanted)


def _inputs_of_engine() -> set[int]:
    """The identities of the tensors and nodes that the backward running in this thread was asked for; empty if not known."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _ENGINE_CODE:
            inputs = frame.f_locals["args"][3]
            return {id(item if isinstance(item, torch.Tensor) else item.node) for item in inputs}
        frame = frame.f_back
    return set()


def is_any_autocast_on() -> bool:
    """Whether autocast is enabled for any device."""
    return bool(torch._C._is_any_autocast_enabled())  # type: ignore[attr-defined]


def random_states(cuda_devices: Sequence[int]) -> list[torch.Tensor]:
    """The states of the default generators: of the CPU, and of these devices."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda_devices)]


@contextlib.contextmanager
def random_states_set(states: Sequence[torch.Tensor], cuda_devices: Sequence[int]) -> Iterator[None]:
    """Earlier states of the default generators in the block, and their own ones after it."""
    with torch.random.fork_rng(devices=list(cuda_devices)):
        set_random_states(states, cuda_devices)
        yield


def set_random_states(states: Sequence[torch.Tensor], cuda_devices: Sequence[int]) -> None:
    """Put the default generators back to states that :func:`random_states` read."""
    torch.set_rng_state(states[0])
    for device, state in zip(cuda_devices, states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)


def math_attention() -> Any:
    """In the block, attention is computed by operators that can be differentiated as often as one likes."""
    return torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH])


def saved_tensor_hooks_change_values() -> bool:
    """Whether hooks on saved tensors are set whose values need not be those that were saved; torch's own keep them."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and not (getattr(top[0], "__module__", None) or "").startswith("torch.")


def needs_real_data(error: BaseException) -> bool:
    """Whether an error says that a kernel has tried to read the data of a fake tensor (torch 2.13)."""
    return isinstance(error, RuntimeError) and "its data is not allocated yet" in str(error)


def has_data_geometry(value: object) -> bool:
    """Whether a tensor is a view whose place in memory depends on data."""
    if not isinstance(value, torch.Tensor) or value._base is None:
        return False
    return any(map(is_data_number, (*value.shape, *value.stride(), value.storage_offset())))


def share_version_counter(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether autograd counts writes to two tensors together; the counters are left as they were."""
    before, other = left._version, right._version
    torch.autograd.graph.increment_version(left)
    try:
        return right._version != other
    finally:
        torch._C._autograd._unsafe_set_version_counter((left,), (before,))


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook of any kind is registered on a tensor's gradient."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def outside_of_transforms() -> contextlib.AbstractContextManager[Any]:
    """A block in which no transform of ``torch.func`` is active."""
    if functorch_level() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()  # type: ignore[no-any-return,no-untyped-call]


def mark_as_view_of_custom_function(view: torch.Tensor) -> None:
    """Make a view one that a custom ``autograd.Function`` has returned: a write to it raises autograd's error."""
    autograd: Any = torch._C._autograd
    autograd._set_creation_meta(view, autograd.CreationMeta.IN_CUSTOM_FUNCTION)


def wanted_gradients() -> list[Any]:
    """The tensors, or edges of the autograd graph, that running backwards were asked for by name (``inputs``).

    The engine tells its nodes nothing about that. A backward on the CPU runs in the thread that asked; one on another device
    does not, and then all threads are looked at.
    """
    found = _wanted_in(sys._getframe())
    if found is None:
        found = [item for frame in sys._current_frames().values() for item in _wanted_in(frame) or ()]
    return found


def _wanted_in(frame: types.FrameType | None) -> list[Any] | None:
    found: list[Any] | None = None
    while frame is not None:
        if frame.f_code is _ENGINE_CODE:
            # (gradients, retain_graph, create_graph, inputs, ...), as torch.autograd.grad and backward hand them over
            found = [*(found or ()), *frame.f_locals["args"][3]]
        frame = frame.f_back
    return found


_ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__


# --- recordings (CUDA graphs) -----------------------------------------------------------------------------------------
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402


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


class QuickShapeEnv(ShapeEnv):
    """A shape environment that does not look for the user's frame at each symbol and guard: under an interpreter there is none
    on Python's stack, and the search took 4 % of the capture of an optimizer's step. Torch 2.13.
    """

    def _get_user_frame(self) -> types.FrameType | None:
        return sys._getframe(1)


# --- nested tensors ---------------------------------------------------------------------------------------------------
from torch.nested._internal.nested_tensor import NestedTensor as JaggedTensor  # noqa: E402
