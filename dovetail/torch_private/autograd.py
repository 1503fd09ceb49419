"""The second door to torch's private names: what compiled autograd needs of the engine, and ``__torch_function__``.

Checked on torch 2.13 (CPU). Everything else of torch's that is private comes through :mod:`dovetail.torch_private.tensors`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo import compiled_autograd as engine_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

EngineCall = Callable[..., Any]

__all__ = ["TorchDispatchMode", "without_dispatch_modes"]


@functools.cache
def _node_functions() -> Any:
    """The table of functional backward formulas. The engine binds each formula once in a process, so it has to be torch's own:
    in a second table, one of the two compilers would miss what the other one was told.
    """
    from torch._dynamo import compiled_autograd  # takes seconds, and few programs need it

    return compiled_autograd.ops


def bind_node_function(name: str, function: Callable[..., Any], is_custom: bool, is_traceable: bool) -> str:
    """Remember the functional form of a kind of autograd node; returns the name that it is found by."""
    return str(_node_functions().add(name, function, is_custom, is_traceable))


def node_function(name: str) -> Callable[..., Any]:
    """The functional form of a kind of autograd node: ``function(gradients, *saved values) -> gradients``."""
    entry = _node_functions().get(name)
    function = getattr(entry, "fn", entry)
    return function  # type: ignore[no-any-return]


#: Where a context keeps what ``set_materialize_grads`` was told; torch's own note of it cannot be read.
MATERIALIZE_NOTE = "_dovetail_materialize_grads"


@functools.cache
def prepare_engine_hook() -> None:
    """Import what the engine hook needs, and keep note of ``ctx.set_materialize_grads`` from now on."""
    _node_functions()
    original = torch.autograd.function.FunctionCtx.set_materialize_grads

    @functools.wraps(original)
    def set_materialize_grads(self: Any, value: bool) -> None:
        original(self, value)
        setattr(self, MATERIALIZE_NOTE, bool(value))

    torch.autograd.function.FunctionCtx.set_materialize_grads = set_materialize_grads  # type: ignore[method-assign]


def set_engine_compiler(factory: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """From now on the autograd engine hands graphs to ``factory()`` instead of running them; returns what was set before."""
    previous, _ = engine_hook.set_autograd_compiler(factory, factory is not None)
    return previous  # type: ignore[no-any-return]


def foreign_captures() -> str:
    """Changes whenever torch's own compiled autograd has captured a graph; it shares the engine's cache with ours."""
    from torch._dynamo import compiled_autograd

    return repr(compiled_autograd.COMPILE_COUNTER)


def clear_engine_cache() -> None:
    """Forget every graph that the engine hook has captured."""
    engine_hook.clear_cache()


def engine_cache_is_empty() -> bool:
    """Whether the engine hook holds no captured graph."""
    return bool(engine_hook.is_cache_empty())


def call_native_tensor_hooks(identifier: int, gradient: torch.Tensor) -> torch.Tensor:
    """Run the hooks that native code registered on a tensor (``retain_grad`` is one)."""
    return engine_hook.call_cpp_tensor_pre_hooks(identifier, gradient)  # type: ignore[no-any-return]


def engine_run_backward() -> EngineCall:
    """What ``torch.autograd.backward`` and ``torch.autograd.grad`` call."""
    return torch.autograd._engine_run_backward


def replace_engine_run_backward(function: EngineCall) -> None:
    """Let ``torch.autograd.backward`` and ``torch.autograd.grad`` call ``function``."""
    torch.autograd._engine_run_backward = function  # type: ignore[assignment]


def gradient_node(tensor: torch.Tensor) -> Any:
    """The autograd node that a tensor's gradient arrives at."""
    return torch.autograd.graph._get_grad_fn_or_grad_acc(tensor)


def sequence_number(node: Any) -> int:
    """The order in which a node was made; the engine runs ready nodes from the newest to the oldest."""
    return int(node._sequence_nr())


def output_edges(node: Any) -> Sequence[tuple[Any, int]]:
    """Where a node's outputs go: next node (None where no gradient is needed) and which of its inputs."""
    return node.next_functions  # type: ignore[no-any-return]


def symbolic_integer(node: Any) -> torch.SymInt:
    """A symbolic integer around an object that answers what torch asks of one."""
    return torch.SymInt(node)


def symbolic_float(node: Any) -> torch.SymFloat:
    """A symbolic float around an object that answers what torch asks of one."""
    return torch.SymFloat(node)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps or overlaps."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def current_backward() -> int:
    """The number of the backward that runs in this thread, -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def will_execute() -> Callable[[Any], bool]:
    """What torch asks whether the running backward will come to a node."""
    return torch._C._will_engine_execute_node


def replace_will_execute(function: Callable[[Any], bool]) -> None:
    """Let torch ask ``function`` whether the running backward will come to a node."""
    torch._C._will_engine_execute_node = function  # type: ignore[assignment]


def has_freed_its_saved_tensors(node: Any) -> bool:
    """Whether a node of a ``torch.autograd.Function`` has run before, without ``retain_graph``."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    try:
        node._raw_saved_tensors  # type: ignore[attr-defined]  # noqa: B018
    except RuntimeError:
        return True
    return False


def storage_references(tensor: torch.Tensor) -> int:
    """How many hold a tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


HAS_TORCH_FUNCTION = (
    torch._C._has_torch_function,
    torch._C._has_torch_function_unary,
    torch._C._has_torch_function_variadic,
)
"""What torch's own Python functions ask before anything else (checked on 2.13)."""


def overrides_torch_function(value: Any) -> bool:
    """Whether a value wants to be asked about the torch functions that it is given to, whatever modes there are."""
    implementation = getattr(type(value), "__torch_function__", None)
    return type(value) is not torch.Tensor and implementation not in (None, torch._C._disabled_torch_function_impl)


def saved_through_hooks(node: Any) -> list[tuple[Any, str, int | None]]:
    """What a node has saved through saved-tensor hooks: the raw saved tensor, the attribute that gives it (or the tuple that it
    is in) with its autograd history, and where in the tuple. Torch 2.13.
    """
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        names = ["_raw_saved_tensors"]
    else:
        names = [name for name in dir(type(node)) if name.startswith("_raw_saved_")]
    found: list[tuple[Any, str, int | None]] = []
    for name in names:
        raw = getattr(node, name)
        attribute = "saved_tensors" if name == "_raw_saved_tensors" and len(names) == 1 else name.removeprefix("_raw")
        items = [(raw, None)] if not isinstance(raw, tuple) else [(item, place) for place, item in enumerate(raw)]
        found += [
            (item, attribute, place) for item, place in items if item is not None and item.unpack_hook is not None
        ]
    return found


def is_checkpoint_valid() -> Callable[[], bool]:
    """What reentrant checkpoints ask: whether the running backward is after the gradients of all leaves. Torch 2.13."""
    return torch.autograd._is_checkpoint_valid


def replace_is_checkpoint_valid(function: Callable[[], bool]) -> None:
    """Let reentrant checkpoints ask ``function``."""
    torch.autograd._is_checkpoint_valid = function


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread gets. Torch 2.13."""
    return int(torch._C._autograd._get_sequence_nr())


def is_leaf_node(node: Any) -> bool:
    """Whether gradients are added up here: such nodes have no number of their own."""
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def put_hook_first(node: Any, hook: Callable[..., Any]) -> None:
    """Register a hook that runs after a node, in front of those that there are."""
    handle = node.register_hook(hook)
    handle.hooks_dict_ref().move_to_end(handle.id, last=False)


def hooks_registered() -> int:
    """How many hooks were registered so far in this process, on tensors, nodes and modules. Torch 2.13."""
    return int(torch.utils.hooks.RemovableHandle.next_id)


def has_node_hooks(leaf: torch.Tensor) -> bool:
    """Whether Python has registered hooks on the node at which a leaf's gradient arrives. Torch 2.13.

    The node shows them to the garbage collector, unless an autograd graph holds the node. Then a hook that is registered, and
    removed at once, comes into the same table as the others.
    """
    if not leaf.requires_grad:
        return False
    node = gradient_node(leaf)
    return any(gc.get_referents(node)) or any(map(_has_others, (node.register_prehook, node.register_hook)))


def _has_others(register: Callable[[Callable[..., None]], Any]) -> bool:
    """Whether there are hooks beside one that is registered. What numbers them is set back: nothing has been registered."""
    kind: Any = torch.utils.hooks.RemovableHandle
    before = kind.next_id
    handle = register(lambda *gradients: None)
    try:
        return len(handle.hooks_dict_ref()) > 1
    finally:
        handle.remove()
        if kind.next_id == before + 1:
            kind.next_id = before
