"""The backward of a ``torch.autograd.Function``, and of a function that Dovetail has compiled, in a captured backward."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.rules import rule
from dovetail.runtime.backward_reads import CallReads
from dovetail.torch_private import engine as private_engine


class SavedContext:
    """The ``ctx`` of a ``torch.autograd.Function`` in a captured backward: the real one with its own saved tensors.

    The engine has freed those of the real one by the time the backward runs.
    """

    __slots__ = ("_context", "_tensors")
    _context: Any
    _tensors: tuple[Any, ...]

    def __init__(self, context: Any, tensors: Sequence[Any]) -> None:
        object.__setattr__(self, "_context", context)
        object.__setattr__(self, "_tensors", tuple(tensors))

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tensors given to ``save_for_backward``."""
        return self._tensors

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        """The same tensors, by the name that torch has deprecated."""
        warnings.warn("'saved_variables' is deprecated; use 'saved_tensors'", DeprecationWarning, stacklevel=2)
        return self._tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._context, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._context, name)


# The real context is a node, and a backward may ask whether its own is one.
torch.autograd.graph.Node.register(SavedContext)


def call_backward(
    context: Any, is_tensor: Sequence[bool], was_defined: Sequence[bool], saved: Sequence[Any], *gradients: Any
) -> tuple[Any, ...]:
    """Call the backward of a ``torch.autograd.Function``; returns one result for each argument of the forward.

    ``was_defined`` says which gradients there were at the capture. If one of these is missing now, it becomes None or zeros here;
    for the others the engine has decided that.
    """
    kind = context._forward_cls
    count = len(context.needs_input_grad)
    if kind.backward is not torch.autograd.Function.backward and kind.vjp is not torch.autograd.Function.vjp:
        raise RuntimeError(
            "Implementing both 'backward' and 'vjp' for a custom Function is not allowed. You should only implement one of them."
        )
    backward = kind.vjp if kind.vjp is not torch.autograd.Function.vjp else kind.backward
    if any(item is None for item in gradients):
        gradients = tuple(
            item if item is not None or not known else _materialized(context, index)
            for index, (item, known) in enumerate(zip(gradients, was_defined, strict=True))
        )
    results = backward(SavedContext(context, saved), *gradients)
    if not isinstance(results, tuple):
        results = (results,)
    if len(results) > count and all(item is None for item in results[count:]):
        results = results[:count]
    name = f"{kind.__name__}Backward"
    if len(results) != count:
        raise RuntimeError(
            f"function {name} returned an incorrect number of gradients (expected {count}, got {len(results)})"
        )
    for position, (item, tensor) in enumerate(zip(results, is_tensor, strict=True)):
        if not tensor and item is not None:
            raise RuntimeError(
                f"function {name} returned a gradient different than None at position {position + 1}, "
                "but the corresponding forward input was not a Variable"
            )
        if item is not None and not isinstance(item, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(item).__name__})")
    return tuple(item if needed else None for item, needed in zip(results, context.needs_input_grad, strict=True))


def compiled_prologue(context: Any, was_defined: Sequence[bool], saved: Sequence[Any], *gradients: Any) -> list[Any]:
    """Prepare the inputs of the backward graph of a function that Dovetail has compiled."""
    if [item is not None for item in gradients] != list(was_defined):
        raise CaptureError(
            "other results of a compiled function get gradients than when the backward was captured, although the autograd "
            "graph is the same",
            advice="a torch.autograd.Function gives None in some calls only: let it give zeros, or run this backward eagerly",
        )
    return context._forward_cls.prologue(context, saved, gradients)  # type: ignore[no-any-return]


@rule(CallReads.check)
def _check_reads(interpreter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The check belongs to each call: captured, its own reads of the program's objects would be guards of the segment."""
    raise Break(
        "the backward of a compiled function checks what its forward has read", "compile the whole step instead"
    )


def of_either_order(first: Any, higher: Any) -> Any:
    """Stand for one gradient that is computed in two ways: by a compiled function's graph, and by its differentiable backward.

    ``CapturedBackward.graph_for`` chooses one of them.
    """
    raise AssertionError("a captured backward runs without having become a graph")


def _materialized(context: Any, index: int) -> torch.Tensor | None:
    """Replace a missing gradient: by zeros, or by None if the forward called ``set_materialize_grads(False)``."""
    kind = context._forward_cls
    wanted = getattr(context, private_engine.MATERIALIZE_NOTE, None)
    if wanted is None:
        codes = [getattr(getattr(kind, name), "__code__", None) for name in ("forward", "setup_context")]
        if any(code is not None and "set_materialize_grads" in code.co_names for code in codes):
            raise CaptureError(
                f"{kind.__name__} got no gradient, and whether it wants zeros was decided before the block was entered",
                advice="run the forward inside of the compiled_autograd block too",
            )
    if wanted is False:
        return None
    like = context._input_metadata[index]
    return torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)
