"""Hooks on tensors and nodes in a captured backward: eager's calls, checks and messages."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch


def is_traceable(hook: Any, create_graph: bool = False) -> bool:
    """Whether a hook, or the backward behind a context, is code of the user's that a graph can hold.

    Hooks of torch itself ask the engine where it is and keep records of it. The backward of a function that Dovetail has compiled
    is a compiled function of its own where ``create_graph`` asks for its derivative.
    """
    kind = getattr(hook, "_forward_cls", None)
    if kind is not None:
        return not _is_torchs(kind) and not (create_graph and hasattr(kind, "backward_graph"))
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    if isinstance(function, types.FunctionType):
        return not _is_torchs(function) and not any(_holds_torchs(cell) for cell in function.__closure__ or ())
    return False


def _is_torchs(value: Any) -> bool:
    return str(getattr(value, "__module__", None) or "torch").split(".", 1)[0] in ("torch", "torchgen", "functorch")


def _holds_torchs(cell: types.CellType) -> bool:
    try:
        inside = cell.cell_contents
    except ValueError:
        return True
    return isinstance(inside, types.FunctionType) and _is_torchs(inside)


def _hook_name(hook: Any) -> str:
    return str(getattr(hook, "__name__", "<unknown>"))


def _check_one(before: Any, after: Any, hook: Any) -> None:
    if after is None:
        return
    if before is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if not isinstance(after, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{type(after).__name__}'")
    if (before.dtype, before.device, before.layout) != (after.dtype, after.device, after.layout):
        raise RuntimeError(
            f"hook '{_hook_name(hook)}' has changed the type of value (was {before.type()} got {after.type()})"
        )
    if before.shape != after.shape:
        raise RuntimeError(f"hook '{_hook_name(hook)}' has changed the size of value")


def _call_with_tuple(hook: Any, before: tuple[Any, ...], *rest: Any) -> tuple[Any, ...]:
    """Call the hook of a node, whose result takes the place of the tuple ``before`` if it is not None."""
    after = hook(before, *rest)
    if after is None or after is before:
        return before
    if not isinstance(after, tuple):
        raise TypeError(f"expected tuple, but hook returned '{type(after).__name__}'")
    if len(before) != len(after):
        raise RuntimeError(
            f"hook '{_hook_name(hook)}' has returned an incorrect number of values "
            f"(got {len(after)}, but expected {len(before)})"
        )
    for left, right in zip(before, after, strict=True):
        _check_one(left, right, hook)
    return after


def call_tensor_hook(hook: Callable[[Any], Any], gradient: Any) -> Any:
    """Call a hook of ``Tensor.register_hook``, whose result takes the gradient's place if it is not None."""
    result = hook(gradient)
    _check_one(gradient, result, hook)
    return gradient if result is None else result


def call_node_pre_hook(hook: Callable[..., Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Call a hook of ``Node.register_prehook``."""
    return _call_with_tuple(hook, tuple(gradients))


def call_node_post_hook(hook: Callable[..., Any], outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Call a hook of ``Node.register_hook``."""
    return _call_with_tuple(hook, tuple(outputs), tuple(inputs))


def call_post_accumulate_hook(hook: Callable[[Any], Any], variable: torch.Tensor, gradient: Any) -> None:
    """Call a hook of ``Tensor.register_post_accumulate_grad_hook``, unless no gradient came and nothing was accumulated."""
    if gradient is None:
        return
    result = hook(variable)
    if result is not None and result is not variable:
        raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def unpack_saved(hook: Callable[[Any], Any], packed: Any) -> torch.Tensor:
    """Call the unpack hook of a saved tensor."""
    result = hook(packed)
    if not isinstance(result, torch.Tensor):
        raise TypeError("Output of saved tensor unpack_hook expected to be a Tensor")
    return result
