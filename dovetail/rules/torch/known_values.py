"""Calls that torch cannot trace because they need numbers in tensors: for the numbers that small inputs have now, under a guard."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, data_rule
from dovetail.guards import ComputedSource, Equals
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.whole_calls import whole  # noqa: F401  (its rule for calls that need data is asked first)

_MOST_ELEMENTS = 64


def elements_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The elements of a small tensor of whole numbers.

    >>> elements_of(torch.tensor([2, 3]))
    (2, 3)
    """
    return tuple(tensor.flatten().tolist())


@data_rule
def with_known_values(
    interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords, result: Any
) -> Any:
    """The call with plain numbers in the place of small tensors of whole numbers that are inputs; guards hold them to these."""
    trace, values = interpreter.trace, interpreter.values
    found = False

    def plain(leaf: Any) -> Any:
        nonlocal found
        item = trace.input_of(leaf) if isinstance(leaf, torch.Tensor) else None
        if item is None or trace.node_of(item.value) is not item.node or not _holds_few_integers(item.real):
            return leaf
        with private_tracing.disable_current_modes(), private_calls.no_torch_function():
            numbers = item.real.tolist()
        elements = (numbers,) if item.real.dim() == 0 else tuple(numbers)
        source = values.guards.tensor_source(item.index)
        held = ComputedSource(elements_of, (source,), f"the elements of {source.name}")
        values.guard(held, Equals(elements), f"{function.__name__} was given it")
        found = True
        return numbers if item.real.dim() == 0 else elements

    leaves, structure = private_trees.tree_flatten((args, kwargs))
    arguments, keywords = private_trees.tree_unflatten([plain(leaf) for leaf in leaves], structure)
    return function(*arguments, **keywords) if found else NotImplemented


def _holds_few_integers(real: torch.Tensor) -> bool:
    is_whole = not (real.dtype.is_floating_point or real.dtype.is_complex or real.dtype == torch.bool)
    return is_whole and real.dim() < 2 and real.device.type == "cpu" and real.numel() <= _MOST_ELEMENTS
