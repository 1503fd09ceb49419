"""Whether two tiers of one graph agree: results, written inputs and gradients, on copies of a call's inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.backends import Backend
from dovetail.backends.debug.values import difference
from dovetail.torch_private import state as private_state

#: Two ways to compute the same differ by more than one operator does: a bound for what can only be a fault.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-3


def difference_of_tiers(
    first: CompiledGraph, second: CompiledGraph, inputs: Sequence[torch.Tensor], backend: Backend
) -> str:
    """In words how the second graph's results differ from the first one's; empty where they agree.

    Nothing of the call is changed, and no random numbers are drawn.
    """
    relative, absolute = backend.tolerances
    wide = dataclasses.replace(backend, tolerances=(max(relative, _RELATIVE), max(absolute, _ABSOLUTE)))
    if _share_memory(inputs):
        return ""
    try:
        wanted, found = _values_of(first, inputs), _values_of(second, inputs)
    except Exception as error:  # noqa: BLE001  (whatever a kernel may raise)
        return f"{type(error).__name__}: {error}"
    for (what, one), (_, other) in zip(found, wanted, strict=True):
        text = difference(one, other, wide)
        if text:
            return f"{what} {text}"
    return ""


def _share_memory(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether two inputs lie in one memory, which copies would not."""
    given = [item for item in inputs if isinstance(item, torch.Tensor) and item.numel()]
    return len({item.untyped_storage().data_ptr() for item in given}) < len(given)


def _values_of(graph: CompiledGraph, inputs: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor | None]]:
    """Results, inputs behind the call, and gradients for tangents of ones, each with its name."""
    with private_state.preserved_rng_state():
        copies = [_copy(item) for item in inputs]
        results = graph.run(list(copies))
        values: list[tuple[str, torch.Tensor | None]] = [(f"result {at}", item) for at, item in enumerate(results)]
        leaves = [item for item in copies if isinstance(item, torch.Tensor) and item.requires_grad and item.is_leaf]
        ends = [item for item in results if isinstance(item, torch.Tensor) and item.grad_fn is not None]
        if leaves and ends:
            tangents = [torch.ones_like(item) for item in ends]
            gradients = torch.autograd.grad(ends, leaves, tangents, allow_unused=True)
            values += [(f"gradient {at}", item) for at, item in enumerate(gradients)]
        return [*values, *((f"input {at}", item) for at, item in enumerate(copies))]


def _copy(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return new.requires_grad_(value.requires_grad)
