"""Autograd: its nodes, the backward that the engine runs, saved tensors and hooks. Checked on torch 2.11 to 2.13.

The functions by which compiled autograd replaces the engine are in :mod:`dovetail.torch_private.engine`.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

_autograd: Any = torch._C._autograd
_ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__
#: Questions to the engine that may raise before all leaves count as wanted: each error takes 50 us.
_MOST_ERRORS = 4


# ----------------------------------------------------------------------------------------------------------------------


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return _autograd._get_sequence_nr()


def sequence_number(node: Any) -> int:
    """The order in which a node was made; the engine runs ready nodes from the newest to the oldest."""
    return int(node._sequence_nr())


def gradient_node(tensor: torch.Tensor) -> Any:
    """The autograd node at which a tensor's gradient arrives."""
    return torch.autograd.graph._get_grad_fn_or_grad_acc(tensor)


def is_leaf_node(node: Any) -> bool:
    """Whether gradients are added up here: such nodes have no number of their own."""
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def new_function_number() -> int:
    """A number that no class of ``torch.autograd.Function`` has: compiled autograd tells nodes apart by theirs (torch 2.13)."""
    return next(torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER)


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without the walk over all arguments that looks for dead wrappers of functorch.

    The walk takes 150 us for 757 arguments, nearly half of the whole. Not for use while a functorch transform is active.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


# ------------------------------------------------------------------------------------------------------- the running ba


def current_backward() -> int:
    """The number of the backward that runs in this thread, -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def running_autograd_node() -> Any:
    """The autograd node that the engine evaluates right now in this thread, or None."""
    return torch._C._current_autograd_node()


def keeps_graph() -> bool:
    """Whether the backward that runs now leaves the graph for another one (``retain_graph``)."""
    return bool(_autograd._get_current_graph_task_keep_graph())


def wanted_gradients() -> list[Any]:
    """The tensors, or edges of the autograd graph, that running backwards were asked for by name (``inputs``).

    The engine tells its nodes nothing about that. A backward on the CPU runs in the thread that asked; one on another device
    does not, and then all threads are looked at.
    """
    found = _asked_for(sys._getframe())
    if not found:
        found = [inputs for frame in sys._current_frames().values() for inputs in _asked_for(frame)]
    return [item for inputs in found for item in inputs]


def wanted_edges(edges: Sequence[tuple[Any, int]]) -> tuple[int, ...]:
    """Positions of the edges of the autograd graph that the backward that runs now will come to (or more than those)."""
    leading = [index for index, (node, _) in enumerate(edges) if node is not None]
    if len(leading) == 1:
        # The node runs because of it.
        return tuple(leading)
    calls = _asked_for(sys._getframe())
    asked = {id(item if isinstance(item, torch.Tensor) else item.node) for item in (calls[0] if calls else ())}
    wanted: list[int] = []
    raised = 0
    for index in leading:
        node = edges[index][0]
        is_leaf = hasattr(node, "variable")
        if asked and is_leaf:
            # torch raises when it is asked about a leaf that autograd.grad was asked for.
            if id(node.variable) in asked or id(node) in asked:
                wanted.append(index)
            continue
        # Not known for a backward on another device, which runs in a thread of its own.
        if raised < _MOST_ERRORS or not is_leaf:
            try:
                if not torch._C._will_engine_execute_node(node):
                    continue
            except RuntimeError:
                raised += 1
        wanted.append(index)
    return tuple(wanted)


def _asked_for(frame: types.FrameType | None) -> list[Sequence[Any]]:
    """The ``inputs`` of each backward on a thread's stack, the innermost first."""
    found: list[Sequence[Any]] = []
    while frame is not None:
        if frame.f_code is _ENGINE_CODE:
            # (gradients, retain_graph, create_graph, inputs, ...), as torch.autograd.grad and backward hand them over
            found.append(frame.f_locals["args"][3])
        frame = frame.f_back
    return found


# --------------------------------------------------------------------------------------------------------------- saved


def make_saved_tensor(value: torch.Tensor) -> Any:
    """An input as an autograd node saves it: ``unpack()`` gives it with its gradient edge, or eager's error if it was
    written to meanwhile. It takes 0.3 us, and makes no cycle when the input itself is written to later.
    """
    return _autograd._make_saved_tensor(value, False)


def saved_value(node: Any, name: str) -> Any:
    """The value that an autograd node has saved under ``name``; a negative dimension comes back as the number that it is."""
    value = getattr(node, f"_saved_{name}")
    return value - (1 << 64) if type(value) is int and value >= 1 << 63 else value


def saved_tensor_hooks() -> Any:
    """The innermost default hooks for saved tensors, or None."""
    return _autograd._top_saved_tensors_default_hooks(True)


def has_saved_tensor_hooks() -> bool:
    """Whether default hooks for saved tensors are active."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensor_hooks_change_values() -> bool:
    """Whether hooks on saved tensors are set whose values need not be those that were saved; torch's own keep them."""
    top = saved_tensor_hooks()
    return top is not None and not (getattr(top[0], "__module__", None) or "").startswith("torch.")


# ----------------------------------------------------------------------------------------------------------------------


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook of any kind is registered on a tensor's gradient."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def hooks_registered() -> int:
    """The number of hooks registered so far in this process, on tensors, nodes and modules."""
    return int(torch.utils.hooks.RemovableHandle.next_id)


def has_node_hooks(leaf: torch.Tensor) -> bool:
    """Whether Python has registered hooks on the node at which a leaf's gradient arrives.

    The node shows them to the garbage collector, unless an autograd graph holds the node. Then a hook that is registered, and
    removed at once, comes into the same table as the others.
    """
    if not leaf.requires_grad:
        return False
    node = gradient_node(leaf)
    return any(gc.get_referents(node)) or any(map(_has_others, (node.register_prehook, node.register_hook)))


def _has_others(register: Callable[[Callable[..., None]], Any]) -> bool:
    """Whether there are hooks beside one that is registered here; the counter that numbers hooks is set back."""
    kind: Any = torch.utils.hooks.RemovableHandle
    before = kind.next_id
    handle = register(lambda *gradients: None)
    try:
        return len(handle.hooks_dict_ref()) > 1
    finally:
        handle.remove()
        if kind.next_id == before + 1:
            kind.next_id = before
