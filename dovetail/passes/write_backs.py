"""Graphs that write new values into their inputs themselves.

Captured graphs are functional: a graph returns the new value of a written input as an output, and the runtime copies it back.
A backend that knows these outputs writes them in its own kernels, without a second tensor and without a copy. Where operators run
one by one, each value is written, and freed, when nothing reads the old one any more: a step holds no second set of weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from dovetail.aot.steps import BackendGraph, Lowering, before_backend
from dovetail.backends import ATEN
from dovetail.backends.protocol import output_arguments
from dovetail.passes.editing import copy_graph
from dovetail.passes.mutations import Memory


@before_backend
def write_early(lowering: Lowering, unit: BackendGraph) -> BackendGraph:
    """Let the operators of a graph write; registered behind the passes that take inputs away."""
    if unit.kind != "inference" or not unit.write_backs or lowering.backend.compile is not ATEN.compile:
        return unit
    graph = copy_graph(unit.graph)
    write_back(graph, unit.write_backs, early=True)
    return dataclasses.replace(unit, graph=graph)


def write_back(graph: torch.fx.GraphModule, write_backs: Mapping[int, int], *, early: bool = False) -> list[int]:
    """Put a write into the graph for each new value of an input (output -> input), and return the input in its place.

    Returns the inputs that the graph now writes to. A value that may lie in the memory of an input stays an output, because
    the new value of one input may be the old one of another, and the order of writing would matter. The writes are a ``copy_`` each
    at the end, or (``early``) as soon as the old value was read for the last time.
    """
    if not write_backs:
        return []
    memory = Memory(graph)
    placeholders = graph.graph.find_nodes(op="placeholder")
    inputs = memory.groups(placeholders)
    results = output_arguments(graph)
    *nodes, output = graph.graph.nodes
    order = {node: position for position, node in enumerate(nodes)}
    last_reads = {memory.group(item): node for node in nodes for item in node.all_input_nodes}
    written = []
    for index, target in write_backs.items():
        value, place = results[index], placeholders[target]
        if not isinstance(value, torch.fx.Node) or memory.group(value) in inputs:
            continue
        last = max(value, last_reads.get(memory.group(place), value), key=order.__getitem__)
        with graph.graph.inserting_before(last.next if early else output):
            copied = graph.graph.call_function(_write if early else torch.ops.aten.copy_.default, (place, value))
        copied.meta = {**value.meta, "val": place.meta["val"]}
        results[index] = place
        written.append(target)
    output.args = (results,)
    graph.recompile()
    return written


def _write(place: torch.Tensor, value: torch.Tensor) -> None:
    """Behind the version counter: the runtime raises it once for each input that the graph has written."""
    place.data.copy_(value)
