"""What a frontend hands to stage 1: one frozen class for calls that were interpreted, graphs of other compilers, and replays."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.aot.descriptors import Descriptor
from dovetail.guards import AmbientChange, AmbientState, GuardSet
from dovetail.runtime.effects import EffectRecipe
from dovetail.runtime.recipe import Recipe
from dovetail.trace import Bindings, Program

Place = tuple[int, str]
"""A position among the live values, and the way from there as sources spell it: ``(0, "[1]")``."""
NamesAfter = Mapping[int, Sequence[str]]
"""The names that values from before a graph break have after it, by their position before it."""


@dataclass(frozen=True)
class BreakSymbols:
    """What is symbolic among the live values at a graph break.

    ``sizes`` maps tensors to their symbolic dimensions, ``numbers`` are symbolic numbers and tuples with such items.
    ``unchanged`` names the values that the part before the break was given and only passes on, by position; of these, the values at
    the positions ``made`` come from the instruction at an earlier graph break.

    >>> BreakSymbols(numbers=frozenset({(0, "[1]")})).numbers_after({0: ["L['shape']"]})
    frozenset({"L['shape'][1]"})
    """

    sizes: Mapping[Place, frozenset[int]] = field(default_factory=dict)
    numbers: frozenset[Place] = frozenset()
    unchanged: Mapping[int, str] = field(default_factory=dict)
    made: frozenset[int] = frozenset()

    def with_made(self, names: frozenset[str]) -> BreakSymbols:
        """The same in a part whose arguments of these names were made at the graph break before it."""
        made = frozenset(position for position, name in self.unchanged.items() if name in names)
        return dataclasses.replace(self, made=self.made | made)

    def merged(self, other: BreakSymbols) -> BreakSymbols:
        """The union with what another capture that ends at the same place has found."""
        sizes = dict(self.sizes)
        for place, dims in other.sizes.items():
            sizes[place] = sizes.get(place, frozenset()) | dims
        unchanged = {**self.unchanged, **other.unchanged}
        return BreakSymbols(sizes, self.numbers | other.numbers, unchanged, self.made | other.made)

    def sizes_after(self, names: NamesAfter) -> Iterator[tuple[str, frozenset[int]]]:
        """Names of tensors after the break with their symbolic dimensions."""
        for (position, way), dims in self.sizes.items():
            for name in names.get(position, ()):
                yield name + way, dims

    def numbers_after(self, names: NamesAfter) -> frozenset[str]:
        """Names of symbolic numbers after the break."""
        return frozenset(name + way for position, way in self.numbers for name in names.get(position, ()))


@dataclass(frozen=True, eq=False)
class CaptureResult:
    """One captured call.

    ``outputs`` are the traced tensors that leave it, ``input_descriptors`` says where each traced input was read, ``program``
    computes the outputs by the torch calls of the function, ``bindings`` says where symbols are read at a later call. ``order`` is
    that of the derivative which the backward of the graph computes.

    The rest is what an entry does around the graph at every call. ``recipe`` builds the result; its symbolic numbers are
    ``numbers``, as expressions over ``bindings``. ``effects`` are the writes to Python objects. ``ambient`` is the state of torch
    in which the call began, ``ambient_change`` what the call changes in it. ``gradients_dropped_first`` are inputs whose ``.grad``
    is dropped before the graph runs, each with the input that the gradient is; ``inputs_made_differentiable`` require a gradient
    from then on.

    At a graph break, ``resume_point`` says where the function goes on (:mod:`dovetail.frontend.code.points`), ``recipe`` builds the
    live values there, and ``break_symbols`` says which of them are symbolic.
    """

    function: Any
    outputs: tuple[torch.Tensor, ...]
    input_descriptors: tuple[Descriptor, ...]
    guards: GuardSet
    program: Program
    bindings: Bindings
    order: int = 1
    recipe: Recipe | None = None
    numbers: tuple[Any, ...] = ()
    effects: tuple[EffectRecipe, ...] = ()
    ambient: AmbientState | None = None
    ambient_change: AmbientChange | None = None
    gradients_dropped_first: tuple[tuple[int, int], ...] = ()
    inputs_made_differentiable: tuple[int, ...] = ()
    resume_point: Hashable | None = None
    break_symbols: BreakSymbols | None = None
