"""The door to torch's private names where torch.compile is the caller, and for its counters.

Checked on torch 2.13 (CPU). What is private elsewhere comes through :mod:`dovetail.torch_private.tensors`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.associative_scan import associative_scan as associative_scan
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    FakeTensor,
)
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)

from dovetail.torch_private.sizes import is_data_number
from dovetail.torch_private.tensors import functorch_level


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


def inductor_runs_as_is(overload: OpOverload) -> None:
    """Let Inductor call this operator's own kernel where it would otherwise insist on having it decomposed."""
    from torch._inductor import lowering

    if overload not in lowering.lowerings:
        lowering.make_fallback(overload, warn=False, override_decomp=True)


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


def size_inside(value: torch.Tensor) -> torch.Size:
    """The size of what a functional tensor holds; an operator that resizes its ``out=`` changes it, not the outer one.

    Checked on torch 2.13.
    """
    return value.elem.shape  # type: ignore[attr-defined,no-any-return]


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
