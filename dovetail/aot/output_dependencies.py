"""Outputs that were computed from other outputs, found in the autograd graph that the trace has recorded.

This is core: outside, the graph is one node of autograd, and would give ``torch.autograd.grad(z, y)`` of two of its outputs no
gradient where eager gives one. The runtime refuses such a request (:mod:`dovetail.runtime.output_dependencies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.aot.outputs import DescribedOutputs
from dovetail.errors import CaptureError
from dovetail.runtime.spec import FreshOutput, InputOutput, Mutation, OutputDependency, OutputTensor, ViewOutput
from dovetail.trace import TracedInput
from dovetail.trace.overrides import autograd_nodes

Edge = tuple[Any, int]
"""A place of the autograd graph where a gradient arrives: a node and the number of its output."""


def _edge_of(value: torch.Tensor) -> Edge:
    return value.grad_fn, value.output_nr


def find_dependencies(
    described: DescribedOutputs,
    differentiable: Sequence[bool],
    returned: Sequence[torch.Tensor],
    inputs: Sequence[TracedInput],
) -> tuple[OutputDependency, ...]:
    """Find the graph outputs that depend on other results, in an order in which they can be made (or CaptureError)."""
    # For each edge that is seen outside: the result or input there, and the graph output that it is made from.
    results: dict[Edge, tuple[int, int | None]] = {}
    written: dict[Edge, tuple[int, int | None]] = {}
    for mutation in described.mutations:
        value = inputs[mutation.input_index].value
        if mutation.differentiable and value.grad_fn is not None:
            written[_edge_of(value)] = (mutation.input_index, mutation.output_index)
    for position, (value, output) in enumerate(zip(returned, described.outputs, strict=True)):
        if value.requires_grad and value.grad_fn is not None and not isinstance(output, InputOutput):
            results.setdefault(_edge_of(value), (position, _made_from(output, described.mutations)))
    if len(results) + len(written) == 0 or sum(differentiable) == 0:
        return ()
    found: dict[int, OutputDependency] = {}
    needs: dict[int, set[int]] = {}
    for index, (value, flag) in enumerate(zip(described.values, differentiable, strict=True)):
        if not flag:
            continue
        behind = {edge for node in autograd_nodes([value]) for edge in node.next_functions}
        used = [item for edge, item in results.items() if edge in behind and item[1] != index]
        changed = [item for edge, item in written.items() if edge in behind and item[1] != index]
        if used or changed:
            found[index] = OutputDependency(
                index, tuple(position for position, _ in used), tuple(place for place, _ in changed)
            )
            needs[index] = {source for _, source in (*used, *changed) if source is not None}
    return _in_order(found, needs)


def _made_from(output: OutputTensor, mutations: Sequence[Mutation]) -> int | None:
    """The graph output that a result is made from, if any."""
    base = output.base if isinstance(output, ViewOutput) else output
    if isinstance(base, FreshOutput):
        return base.index
    return next((item.output_index for item in mutations if item.input_index == base.index), None)


def _in_order(found: dict[int, OutputDependency], needs: dict[int, set[int]]) -> tuple[OutputDependency, ...]:
    ordered: list[OutputDependency] = []
    waiting = dict(found)
    while waiting:
        ready = [index for index in waiting if not any(need in waiting for need in needs[index])]
        if not ready:
            raise CaptureError(
                "results that are computed from each other are written to in place", advice="return clones of them"
            )
        ordered += [waiting.pop(index) for index in ready]
    return tuple(ordered)
