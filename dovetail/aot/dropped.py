"""Gradients that a step drops before it computes anything: ``zero_grad()`` at its start.

Eager frees their memory there, for the backward to use again. A captured step finds them as inputs that nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.runtime.spec import FreshOutput, OutputTensor, ViewOutput
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing

Runner = Callable[[list[Any]], list[Any]]


def droppable(joint: JointGraph) -> tuple[tuple[int, int], ...]:
    """Pairs of inputs, a tensor and its gradient, of which the gradient is of no use to the graph or to its results."""
    found: tuple[tuple[int, int], ...] = joint.capture.gradients_dropped_first
    if not found or joint.order != 1:
        return ()
    placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
    spec = joint.spec
    needed = {_input_of(output) for output in spec.outputs}
    needed.update(mutation.input_index for mutation in spec.mutations)
    needed.update(change.input_index for change in spec.metadata_changes)
    needed.update(index for tie in spec.ties for index in tie.inputs)

    def is_free(index: int) -> bool:
        node = placeholders[index]
        return index not in needed and not node.users and not private_sizes.has_symbols(node.meta["val"])

    return tuple((owner, gradient) for owner, gradient in found if is_free(gradient))


def _input_of(output: OutputTensor) -> int | None:
    while isinstance(output, ViewOutput):
        output = output.base
    return None if isinstance(output, FreshOutput) else output.index


def without_inputs(graph: torch.fx.GraphModule, indices: Sequence[int]) -> tuple[torch.fx.GraphModule, list[int]]:
    """The graph without some of its inputs, which nothing reads, and the indices of those that are left.

    >>> class Second(torch.nn.Module):
    ...     def forward(self, x, y):
    ...         return [y]
    >>> graph, left = without_inputs(torch.fx.symbolic_trace(Second()), [0])
    >>> left, graph(torch.ones(1))
    ([1], [tensor([1.])])
    """
    if not indices:
        return graph, list(range(len(graph.graph.find_nodes(op="placeholder"))))
    smaller = torch.fx.Graph()
    smaller.output(smaller.graph_copy(graph.graph, {}))
    for node, original in zip(smaller.nodes, graph.graph.nodes, strict=True):
        node.meta = dict(original.meta)
    placeholders = smaller.find_nodes(op="placeholder")
    unused = set(indices)
    for index in unused:
        smaller.erase_node(placeholders[index])
    left = [index for index in range(len(placeholders)) if index not in unused]
    return private_tracing.lazy_graph_module(graph, smaller), left


def taking(run: Runner, left: Sequence[int]) -> Runner:
    """``run``, called with more inputs than it takes."""

    def pick(values: list[Any]) -> list[Any]:
        picked = [values[index] for index in left]
        values.clear()
        return run(picked)

    return pick
