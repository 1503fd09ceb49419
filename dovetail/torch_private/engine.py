"""The autograd engine's hook for compilers, and the functions of torch that compiled autograd replaces. Checked on torch 2.13."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import compiled_autograd as engine_hook

EngineCall = Callable[..., Any]

#: The attribute in which a context keeps the argument of ``set_materialize_grads``; torch's own note of it cannot be read.
MATERIALIZE_NOTE = "_dovetail_materialize_grads"
#: The code of the Python function of torch that calls the engine.
ENGINE_CALLER = torch.autograd.graph._engine_run_backward.__code__


@functools.cache
def _node_functions() -> Any:
    """The table of functional backward formulas. The engine binds each formula once in a process, so it has to be torch's own:
    with a second table, one of the two compilers would not see the formulas bound by the other one.
    """
    from torch._dynamo import compiled_autograd  # takes seconds, and few programs need it

    return compiled_autograd.ops


def bind_node_function(name: str, function: Callable[..., Any], is_custom: bool, is_traceable: bool) -> str:
    """Remember the functional form of a kind of autograd node; returns the name by which it is found."""
    return str(_node_functions().add(name, function, is_custom, is_traceable))


def node_function(name: str) -> Callable[..., Any]:
    """The functional form of a kind of autograd node: ``function(gradients, *saved values) -> gradients``."""
    entry = _node_functions().get(name)
    function = getattr(entry, "fn", entry)
    return function


@functools.cache
def prepare_engine_hook() -> None:
    """Import the parts of torch that the engine hook needs, and keep note of ``ctx.set_materialize_grads`` from now on."""
    _node_functions()
    original = torch.autograd.function.FunctionCtx.set_materialize_grads

    @functools.wraps(original)
    def set_materialize_grads(self: Any, value: bool) -> None:
        original(self, value)
        setattr(self, MATERIALIZE_NOTE, bool(value))

    torch.autograd.function.FunctionCtx.set_materialize_grads = set_materialize_grads  # type: ignore[method-assign]


def set_engine_compiler(factory: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """From now on the autograd engine hands graphs to ``factory()`` instead of running them; returns the one set before."""
    previous, _ = engine_hook.set_autograd_compiler(factory, factory is not None)
    return previous


def foreign_captures() -> str:
    """A text that changes when torch's own compiled autograd captures a graph; it shares the engine's cache with ours."""
    from torch._dynamo import compiled_autograd

    return repr(compiled_autograd.COMPILE_COUNTER)


def clear_engine_cache() -> None:
    """Forget every graph that the engine hook has captured."""
    engine_hook.clear_cache()


def call_native_tensor_hooks(identifier: int, gradient: torch.Tensor) -> torch.Tensor:
    """Run the hooks that native code registered on a tensor (``retain_grad`` is one)."""
    return engine_hook.call_cpp_tensor_pre_hooks(identifier, gradient)


def engine_run_backward() -> EngineCall:
    """The function that ``torch.autograd.backward`` and ``torch.autograd.grad`` call."""
    return torch.autograd._engine_run_backward


def replace_engine_run_backward(function: EngineCall) -> None:
    """Let ``torch.autograd.backward`` and ``torch.autograd.grad`` call ``function``."""
    torch.autograd._engine_run_backward = function  # type: ignore[assignment]


def will_execute() -> Callable[[Any], bool]:
    """The function that torch asks whether the running backward will come to a node."""
    return torch._C._will_engine_execute_node


def replace_will_execute(function: Callable[[Any], bool]) -> None:
    """Let torch ask ``function`` whether the running backward will come to a node."""
    torch._C._will_engine_execute_node = function  # type: ignore[assignment]


def is_checkpoint_valid() -> Callable[[], bool]:
    """The function that reentrant checkpoints ask whether the running backward goes to all leaves."""
    return torch.autograd._is_checkpoint_valid


def replace_is_checkpoint_valid(function: Callable[[], bool]) -> None:
    """Let reentrant checkpoints ask ``function``."""
    torch.autograd._is_checkpoint_valid = function


def has_freed_its_saved_tensors(node: Any) -> bool:
    """Whether a node of a ``torch.autograd.Function`` has run before, without ``retain_graph``."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    try:
        node._raw_saved_tensors  # type: ignore[attr-defined]  # noqa: B018
    except RuntimeError:
        return True
    return False


def saved_through_hooks(node: Any) -> list[tuple[Any, str, int | None]]:
    """The tensors that a node has saved through saved-tensor hooks: the raw saved tensor, the attribute that gives it (or the
    tuple that it is in) with its autograd history, and its position in the tuple.
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


def put_hook_first(node: Any, hook: Callable[..., Any]) -> None:
    """Register a hook that runs after a node, in front of those that there are."""
    handle = node.register_hook(hook)
    handle.hooks_dict_ref().move_to_end(handle.id, last=False)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps or overlaps."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
