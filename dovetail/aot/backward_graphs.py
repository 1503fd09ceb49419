"""The backward graphs of one entry: one for each pattern of defined tangents, each compiled when it is first needed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.tangents import specialise_tangents
from dovetail.runtime.function import FlatCallable, Pattern, TangentStrides
from dovetail.torch_private import sizes as private_sizes

#: A mark in the ``meta`` of a tangent that the backward may be given with any strides.
ANY_LAYOUT = "any_layout"


def taking(run: FlatCallable, order: Sequence[int]) -> FlatCallable:
    """``run``, called with more values than it takes: with those at the places ``order``."""

    def pick(values: list[Any]) -> list[Any]:
        picked = [values[index] for index in order]
        values.clear()
        return run(picked)

    return pick


class BackwardGraphs:
    """Backward callables by pattern of defined tangents; see :class:`dovetail.runtime.function.Backward`.

    ``lower(graph, is_sealed)`` compiles one graph. ``count`` is the number of gradients. ``used``: patterns that were asked for.
    """

    def __init__(
        self,
        backward: torch.fx.GraphModule | None,
        count: int,
        lower: Callable[[torch.fx.GraphModule, bool], FlatCallable],
    ) -> None:
        self._backward = backward
        self._count = count
        self._lower = lower
        self._compiled: dict[Pattern, FlatCallable] = {}
        self.used: dict[Pattern, None] = {}
        self._lock = threading.Lock()
        self._is_sealed = False

    def __call__(self, defined: Pattern) -> FlatCallable:
        """The callable for a pattern; compiles it first where that was not done yet."""
        self.used[defined] = None
        if defined not in self._compiled:
            with self._lock:
                if defined not in self._compiled:
                    self._compiled[defined] = self._compile(defined)
        return self._compiled[defined]

    def graph_of(self, defined: Pattern) -> tuple[torch.fx.GraphModule, Sequence[int]] | None:
        """The graph for a pattern of defined tangents, and which of the saved values and tangents it takes, in order."""
        graph = self._backward
        if graph is None or not any(defined):
            return None
        placeholders = graph.graph.find_nodes(op="placeholder")
        first_tangent = len(placeholders) - len(defined)
        keep = list(range(first_tangent))
        if not all(defined):
            positions = list(range(first_tangent, len(placeholders)))
            graph, unused = specialise_tangents(graph, positions, defined)
            keep = [position for position in keep if position not in unused]
        return graph, [*keep, *range(first_tangent, first_tangent + sum(defined))]

    def seal(self, expected: Pattern) -> None:
        """Compile the graph for the pattern that is expected. From here on, nothing may be assumed about sizes any more."""
        if self._backward is not None:
            self._compiled[expected] = self._compile(expected)
        self._is_sealed = True

    def _compile(self, defined: Pattern) -> FlatCallable:
        found = self.graph_of(defined)
        if found is None:
            # Eager's outputs require a gradient here too, and no gradient reaches any input.
            return lambda values: [None] * self._count
        graph, order = found
        compiled = self._lower(graph, self._is_sealed)
        return compiled if order == list(range(len(order))) else taking(compiled, order)


def expected_pattern(joint: JointGraph) -> Pattern:
    """The expected tangents: the only one of a scalar if there is exactly one (a loss), else all of them."""
    values = [node.meta["val"] for node in joint.tangents]
    scalars = [not private_sizes.has_symbols(value) and value.numel() == 1 for value in values]
    return tuple(scalars) if sum(scalars) == 1 else (True,) * len(values)


def tangent_strides(joint: JointGraph) -> TangentStrides | None:
    """The strides that the backward is compiled for, from the forward's inputs; None: as those of the forward's outputs."""
    if any(ANY_LAYOUT in node.meta for node in joint.tangents):
        count = len(joint.tangents)
        return lambda primals: (None,) * count
    strides = [node.meta["val"].stride() for node in joint.tangents]
    steps = [step for item in strides for step in item]
    if not any(map(private_sizes.is_symbolic, steps)):
        plain = [tuple(item) for item in strides]
        return lambda primals: plain
    if any(map(private_sizes.is_data_number, steps)):
        return None
    compute = joint.capture.bindings.function([*map(private_sizes.expression_of, steps)])
    lengths = [len(item) for item in strides]

    def evaluate(primals: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        numbers = iter(compute(primals))
        return [tuple(itertools.islice(numbers, length)) for length in lengths]

    return evaluate
