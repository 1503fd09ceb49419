"""Gradients that a step drops before it computes anything: ``zero_grad()`` at its start.

Eager frees their memory there, for the backward to use again. A captured step finds them as inputs that nothing reads. They are
taken out of the graph, and the runtime drops them before the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.aot.backward_graphs import taking
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import has_symbolic_sizes
from dovetail.aot.steps import BackendGraph, Lowering, after_partition, before_backend
from dovetail.passes.editing import copy_graph
from dovetail.runtime.spec import FreshOutput, OutputTensor, ViewOutput


@after_partition
def find_dropped(lowering: Lowering) -> Lowering:
    """Note the gradients that can be dropped before the graph runs."""
    return lowering if lowering.is_training else lowering.with_(gradients_dropped_first=droppable(lowering.joint))


@before_backend
def leave_out_dropped(lowering: Lowering, unit: BackendGraph) -> BackendGraph:
    """Compile the graph without them; the callable still takes all inputs."""
    dropped = lowering.gradients_dropped_first
    if not dropped or unit.kind == "backward":
        return unit
    graph, left = without_inputs(unit.graph, [gradient for _, gradient in dropped])
    place_of = {index: place for place, index in enumerate(left)}
    write_backs = {output: place_of[index] for output, index in unit.write_backs.items()}
    return unit.wrapped(lambda run: taking(run, left), graph=graph, write_backs=write_backs)


def droppable(joint: JointGraph) -> tuple[tuple[int, int], ...]:
    """Pairs of inputs, a tensor and its gradient, where neither the graph nor its results need the gradient."""
    found = joint.capture.gradients_dropped_first
    if not found or joint.order != 1:
        return ()
    spec = joint.spec
    needed = {_input_of(output) for output in spec.outputs}
    needed.update(mutation.input_index for mutation in spec.mutations)
    needed.update(change.input_index for change in spec.metadata_changes)
    needed.update(index for dependency in spec.dependencies for index in dependency.inputs)
    primals = joint.primals

    def is_free(index: int) -> bool:
        return index not in needed and not primals[index].users and not has_symbolic_sizes([primals[index]])

    return tuple((owner, gradient) for owner, gradient in found if is_free(gradient))


def _input_of(output: OutputTensor) -> int | None:
    base = output.base if isinstance(output, ViewOutput) else output
    return None if isinstance(base, FreshOutput) else base.index


def without_inputs(graph: torch.fx.GraphModule, indices: Sequence[int]) -> tuple[torch.fx.GraphModule, list[int]]:
    """The graph without some of its inputs, which nothing reads, and the indices of those that are left."""
    smaller = copy_graph(graph)
    placeholders = smaller.graph.find_nodes(op="placeholder")
    for index in indices:
        smaller.graph.erase_node(placeholders[index])
    return smaller, [index for index in range(len(placeholders)) if index not in indices]
