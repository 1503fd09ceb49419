"""The floats that torch's C++ hands to its operators, and which of them depend on a float that it was given.

A function is called twice on fake tensors, forward and backward, with two floats near each other. A float that differs between
the calls was handed on, or computed from what was given. So that is known for the version of torch that is there, and for
arguments of these sizes and dtypes (not of these strides), and not only as somebody has read it in the source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees


class _Floats(private_tracing.TorchDispatchMode):
    """Notes the floats among the arguments of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, float]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = private_trees.tree_leaves((args, kwargs or {}))
        self.found += [(operator, item) for item in leaves if type(item) is float]
        return operator(*args, **(kwargs or {}))


def dependent_floats(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], first: Mapping[int, float]
) -> set[float] | None:
    """The floats that operators are given and that depend on those of ``first``; None where that cannot be told.

    ``first`` has the floats to call with, by the identity of the arguments in whose place they are.

    >>> rate = object()
    >>> dependent_floats(torch.dropout, (torch.ones(2), rate, True), {}, {id(rate): 0.25})
    {0.75}
    """
    second = {key: value * (1 - 2.0**-20) for key, value in first.items()}
    try:
        here, there = (_floats(function, args, kwargs, floats) for floats in (first, second))
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None
    if [operator for operator, _ in here] != [operator for operator, _ in there]:
        return None
    return {value for (_, value), (_, other) in zip(here, there, strict=True) if value != other and value == value}


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _floats(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], floats: Mapping[int, float]
) -> list[tuple[Any, float]]:
    leaves: list[torch.Tensor] = []

    def twin(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return floats.get(id(value), value)
        sizes = [private_sizes.hint(size) for size in value.shape]
        made = torch.empty(sizes, dtype=value.dtype, device=value.device)
        if not value.requires_grad:
            return made
        leaves.append(made.requires_grad_())
        return made.clone()  # It may be written to.

    seen = _Floats()
    with (
        private_tracing.disable_current_modes(),
        private_calls.no_torch_function(),
        private_state.outside_of_transforms(),
        private_state.preserved_rng_state(),
        # In the place of those of the program: a checkpointed region counts what is saved in it.
        torch.autograd.graph.saved_tensors_hooks(_itself, _itself),
        torch.enable_grad(),
        private_tracing.FakeTensorMode(),
    ):
        given, named = private_trees.tree_map(twin, (tuple(args), dict(kwargs)))
        with seen:
            results = private_trees.tree_leaves(function(*given, **named))
            roots = [item for item in results if isinstance(item, torch.Tensor) and item.requires_grad]
            if roots and leaves:
                tangents = [torch.empty_like(item) for item in roots]
                torch.autograd.grad(roots, leaves, tangents, allow_unused=True)
    return seen.found
