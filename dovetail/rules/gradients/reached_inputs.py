"""Inputs that a backward from some of the results comes to.

In eager, a tensor has a gradient after a backward from one result if autograd's nodes lead from there to it. The backward's graph
does not always show that, since a gradient may depend on no incoming one: the zeros of ``round()``, which Inductor's
decompositions make anew, or those for the unused result of a custom function. So it is noted while autograd's nodes are there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.aot.steps import Lowering, after_partition, checks_outputs
from dovetail.aot.tangents import FOR_PATTERN
from dovetail.runtime.function import Pattern
from dovetail.trace import Trace
from dovetail.trace.overrides import autograd_nodes

#: A mark in the ``meta`` of an input: the places of the results, among those with a gradient, that lead to it, as text.
_REACHED_BY = "reached_by"


@checks_outputs
def note_reached(trace: Trace, values: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], order: int) -> None:
    """Mark the inputs to which only some of several results lead."""
    if len(roots) < 2:
        return
    inputs = {id(item.leaf): item.node for item in trace.inputs}
    found: dict[torch.fx.Node, list[str]] = {}
    for place, root in enumerate(roots):
        for node in autograd_nodes([root]):
            if hasattr(node, "variable") and id(node.variable) in inputs:
                found.setdefault(inputs[id(node.variable)], []).append(str(place))
    for traced, places in found.items():
        if len(places) < len(roots):
            traced.meta[_REACHED_BY] = " ".join(places)


@after_partition
def mark_gradients(lowering: Lowering) -> Lowering:
    """Have a backward for some of the incoming gradients leave out what eager does not come to."""
    backward = None if lowering.parts is None else lowering.parts.backward
    reached = [tuple(map(int, node.meta.get(_REACHED_BY, "").split())) for node in lowering.joint.primals]
    if backward is not None and any(reached):
        backward.graph.output_node().meta[FOR_PATTERN] = functools.partial(_reached, reached)
    return lowering


def _reached(reached: Sequence[tuple[int, ...]], args: Any, defined: Pattern) -> tuple[list[Any]]:
    """The gradients for a pattern, None in the place of each that no defined one leads to."""
    results = list(args[0])
    for index, places in enumerate(reached):
        if places and not any(defined[place] for place in places):
            results[index] = None
    return (results,)
