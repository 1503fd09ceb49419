"""``associative_scan`` along a symbolic size, as one call.

torch's algorithm halves the sequence and asks at each level whether there is a rest: unrolled, each length is a graph of its own. A
combining function that does nothing but compute is handed to torch's own algorithm when the graph runs.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.rules.sizes.probed_calls import ProbedCall
from dovetail.rules.sizes.pure_code import Reader
from dovetail.rules.sizes.region_values import GivenTensors, RefusedError
from dovetail.rules.sizes.size_probes import NoRuleError
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees


@rule(private_tracing.associative_scan)
def _associative_scan(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return _scan(interpreter, *args, **kwargs)
    except (RefusedError, NoRuleError, TypeError):
        return interpreter.call_torch(private_tracing.associative_scan, args, kwargs)


def _scan(
    interpreter: TracingInterpreter,
    combine_fn: Any,
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    """The whole call. Raises :class:`RefusedError` where torch's own function does it, or refuses it."""
    elements, structure = private_trees.tree_flatten(interpreter.values.for_native(xs))
    is_known = type(dim) is int and combine_mode == "generic" and isinstance(combine_fn, types.FunctionType)
    if not is_known or private_state.is_any_autocast_on():
        raise RefusedError
    if not elements or not all(isinstance(item, torch.Tensor) and -item.dim() <= dim < item.dim() for item in elements):
        raise RefusedError
    if not any(private_sizes.is_symbolic(item.shape[dim]) for item in elements):
        raise RefusedError
    Reader(interpreter, GivenTensors(interpreter)).function(combine_fn, has_plain_cells=True)

    def run(tensors: Any) -> list[Any]:
        found = private_tracing.associative_scan(
            combine_fn, private_trees.tree_unflatten(list(tensors), structure), 0, reverse, "generic"
        )
        leaves, own = private_trees.tree_flatten(found)
        if own != structure:
            raise NoRuleError
        return [item.contiguous() for item in leaves]

    moved = [interpreter.call_torch(torch.movedim, (item, dim, 0), {}) for item in elements]
    found = ProbedCall(moved, run).record(interpreter, "associative_scan")
    back = [interpreter.call_torch(torch.movedim, (item, 0, dim), {}) for item in interpreter.values.wrap(found)]
    return private_trees.tree_unflatten(back, structure)
