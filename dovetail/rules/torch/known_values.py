"""Calls that torch cannot trace because they need numbers in tensors: for the numbers that small inputs have now, under a guard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, data_rule
from dovetail.guards import Predicate
from dovetail.guards.reading import short
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.whole_calls import whole  # noqa: F401  (its rule for calls that need data is asked first)

_MOST_ELEMENTS = 64


@dataclass(frozen=True)
class Elements(Predicate):
    """A small tensor of whole numbers holds these elements; its shape is guarded elsewhere."""

    values: tuple[int, ...]

    def holds(self, value: Any) -> bool:
        """Whether a tensor holds these elements."""
        return tuple(value.flatten().tolist()) == self.values

    def describe(self, name: str) -> str:
        """The question as a statement."""
        return f"{name} holds {short(self.values)}"

    def failure(self, name: str, value: Any) -> str:
        """A sentence on a tensor with other elements."""
        return f"`{name}` held {short(self.values)}, holds {short(tuple(value.flatten().tolist()))}"


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
        values.guard(source, Elements(elements), f"{function.__name__} was given it")
        found = True
        return numbers if item.real.dim() == 0 else elements

    leaves, structure = private_trees.tree_flatten((args, kwargs))
    arguments, keywords = private_trees.tree_unflatten([plain(leaf) for leaf in leaves], structure)
    return function(*arguments, **keywords) if found else NotImplemented


def _holds_few_integers(real: torch.Tensor) -> bool:
    is_whole = not (real.dtype.is_floating_point or real.dtype.is_complex or real.dtype == torch.bool)
    return is_whole and real.dim() < 2 and real.device.type == "cpu" and real.numel() <= _MOST_ELEMENTS
