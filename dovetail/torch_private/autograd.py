"""Autograd: its nodes, the backward that the engine runs, saved tensors and hooks.

The functions by which compiled autograd replaces the engine are in :mod:`dovetail.torch_private.engine`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

_autograd: Any = torch._C._autograd
_KEEPING_VALUES = ("torch.autograd.graph", "torch.utils.checkpoint", "torch.distributed.")
_ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__
#: The number that the next autograd node of this thread will get.
next_sequence_number: Callable[[], int] = _autograd._get_sequence_nr
#: The number of the backward that runs in this thread, -1 outside of one.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
#: The autograd node that the engine evaluates right now in this thread, or None.
running_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
#: Whether the backward that runs now leaves the graph for another one (``retain_graph``).
keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph


def new_function_number() -> int:
    """A number that no class of ``torch.autograd.Function`` has: compiled autograd tells nodes apart by theirs (torch 2.13)."""
    return next(torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER)


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without the walk over all arguments that looks for dead wrappers of functorch.

    The walk takes 150 us for 757 arguments, nearly half of the whole. Not for use while a functorch transform is active.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def call_directly(function: type[torch.autograd.Function]) -> None:
    """Have the engine call ``function.backward`` without asking first which of two ways the class defines it (0.5 us)."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]


def wanted_gradients() -> list[Any]:
    """The tensors, or edges of the autograd graph, that running backwards were asked for by name (``inputs``).

    The engine tells its nodes nothing about that. A backward on the CPU runs in the thread that asked; one on another device
    does not, and then all threads are looked at.
    """
    found = asked_for(sys._getframe())
    if not found:
        found = [inputs for frame in sys._current_frames().values() for inputs in asked_for(frame)]
    return [item for inputs in found for item in inputs]


def asked_for(frame: types.FrameType | None, most: int = sys.maxsize) -> list[Sequence[Any]]:
    """The ``inputs`` of each backward on a thread's stack, the innermost first, of no more than ``most``."""
    found: list[Sequence[Any]] = []
    while frame is not None and len(found) < most:
        if frame.f_code is _ENGINE_CODE:
            # (gradients, retain_graph, create_graph, inputs, ...), as torch.autograd.grad and backward hand them over
            found.append(frame.f_locals["args"][3])
        frame = frame.f_back
    return found


def saved_tensor_hooks() -> Any:
    """The innermost default hooks for saved tensors, or None."""
    return _autograd._top_saved_tensors_default_hooks(True)


def has_saved_tensor_hooks() -> bool:
    """Whether default hooks for saved tensors are active."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensor_hooks_change_values() -> bool:
    """Whether hooks on saved tensors are set whose values need not be those that were saved; those of torch's modes keep them."""
    top = saved_tensor_hooks()
    return top is not None and not (getattr(top[0], "__module__", None) or "").startswith(_KEEPING_VALUES)


def saved_at(ctx: Any, places: Sequence[int]) -> list[torch.Tensor | None]:
    """The values a node has saved at these places, None elsewhere; raises where one was written to, or is a written result."""
    items = ctx._raw_saved_tensors
    if places and not hasattr(items[places[0]], "unpack"):
        raise RuntimeError("before torch 2.12, saved values are only read together")
    found: dict[int, Any] = {place: items[place].data for place in places}
    # Torch hands over a result of the node's own only with all the others; its version began at 0.
    found |= {at: items[at].unpack() for at, data in found.items() if data.grad_fn is not None or data._version}
    return [found.get(place) for place in range(len(items))]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook of any kind is registered on a tensor's gradient."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)
