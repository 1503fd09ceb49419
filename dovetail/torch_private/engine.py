"""The autograd engine's hook for compilers, and the functions of torch that compiled autograd replaces. Checked on torch 2.13."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C._dynamo import compiled_autograd as engine_hook

#: The attribute in which a context keeps the argument of ``set_materialize_grads``; torch's own note of it cannot be read.
MATERIALIZE_NOTE = "_dovetail_materialize_grads"


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


class EngineFunctions(NamedTuple):
    """The functions of torch in front of the engine, which compiled autograd replaces.

    ``run_backward`` is called by ``torch.autograd.backward`` and ``grad``. Torch asks ``will_execute`` whether the running backward
    will come to a node, and a reentrant checkpoint ``is_checkpoint_valid`` whether it goes to all leaves.
    """

    run_backward: Callable[..., Any]
    will_execute: Callable[[Any], bool]
    is_checkpoint_valid: Callable[[], bool]

    @classmethod
    def present(cls) -> EngineFunctions:
        """The functions that are in force now."""
        return cls(
            torch.autograd._engine_run_backward, torch._C._will_engine_execute_node, torch.autograd._is_checkpoint_valid
        )

    def install(self) -> None:
        """Let torch call these from now on."""
        torch.autograd._engine_run_backward, torch._C._will_engine_execute_node, torch.autograd._is_checkpoint_valid = (
            self  # type: ignore[assignment]
        )


def has_freed_its_saved_tensors(node: Any) -> bool:
    """Whether a node of a ``torch.autograd.Function`` has run before, without ``retain_graph``."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    try:
        node._raw_saved_tensors  # type: ignore[attr-defined]  # noqa: B018
    except RuntimeError:
        return True
    return False


def put_hook_first(node: Any, hook: Callable[..., Any]) -> None:
    """Register a hook that runs after a node, in front of those that there are."""
    handle = node.register_hook(hook)
    handle.hooks_dict_ref().move_to_end(handle.id, last=False)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps or overlaps."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
