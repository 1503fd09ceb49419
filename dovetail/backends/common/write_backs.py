"""Graphs that write new values into their inputs themselves.

Captured graphs are functional: a graph returns the new value of a written input as an output, and the runtime copies it back.
A backend that knows these outputs writes them in its own kernels, without a second tensor and without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.backends.protocol import output_arguments
from dovetail.passes.mutations import Memory


def write_back(graph: torch.fx.GraphModule, write_backs: Mapping[int, int]) -> list[int]:
    """End the graph with a ``copy_`` for each new value of an input (output -> input), and return the input in its place.

    Returns the inputs that the graph now writes to. A value that may lie in the memory of an input stays an output, because
    the new value of one input may be the old one of another, and the order of writing would matter.

    >>> class Count(torch.nn.Module):
    ...     def forward(self, count):
    ...         return [torch.ops.aten.add.Tensor(count, 1)]
    >>> graph = torch.fx.symbolic_trace(Count())
    >>> for node in graph.graph.find_nodes(op="placeholder"):
    ...     node.meta["val"] = torch.zeros(())
    >>> write_back(graph, {0: 0})
    [0]
    >>> count = torch.zeros(())
    >>> graph(count)[0] is count, count
    (True, tensor(1.))
    """
    if not write_backs:
        return []
    memory = Memory(graph)
    placeholders = graph.graph.find_nodes(op="placeholder")
    inputs = memory.groups(placeholders)
    output = graph.graph.find_nodes(op="output")[0]
    results = output_arguments(graph)
    written = []
    for index, target in write_backs.items():
        value, place = results[index], placeholders[target]
        if not isinstance(value, torch.fx.Node) or memory.group(value) in inputs:
            continue
        with graph.graph.inserting_before(output):
            copied = graph.graph.call_function(torch.ops.aten.copy_.default, (place, value))
        copied.meta = {**value.meta, "val": place.meta["val"]}
        results[index] = place
        written.append(target)
    output.args = (results,)
    graph.recompile()
    return written
