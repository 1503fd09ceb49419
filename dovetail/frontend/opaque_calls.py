"""Calls of torch that cannot be traced into operators, kept whole in the graph as one opaque operator."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.frame import Break
from dovetail.frontend.values import is_leaf_value
from dovetail.torch_private import TreeSpec, tree_flatten, tree_unflatten
from dovetail.trace import Trace
from dovetail.trace.opaque import opaque


def call_whole(trace: Trace, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` as one node; raises :class:`Break` for a function that is not pure."""
    name = getattr(function, "__name__", str(function))
    leaves, structure = tree_flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if not all(is_leaf_value(leaf) for leaf in constants):
        raise Break(f"{name} cannot be kept whole: an argument of it is an object")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Break(f"{name} cannot be kept whole under autocast")
    returned: list[TreeSpec] = []

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = list(constants)
        for at, tensor in zip(places, tensors, strict=True):
            values[at] = tensor
        arguments, keywords = tree_unflatten(values, structure)
        results, spec = tree_flatten(function(*arguments, **keywords))
        if not returned:
            returned.append(spec)
        return results

    recorder = trace.recorder
    try:
        with recorder.paused():
            results = opaque(trace, name, call, [leaves[at] for at in places])
    except CaptureError as error:
        raise Break(error.what, error.advice) from error
    result = tree_unflatten(results, returned[0])
    recorder.record(function, args, kwargs, result)
    return result
