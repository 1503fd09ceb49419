"""Inputs that are written to, and whose new values the backward reads: eager saves these inputs themselves.

A graph saves its own output, which a later write to the input does not reach; so the runtime notes the version.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import memory_of
from dovetail.aot.steps import reads_later

_SCATTERS = tuple(f"{name}_scatter.default" for name in ("select", "slice", "diagonal", "as_strided"))


@reads_later
def read_later(joint: JointGraph) -> list[tuple[int, int, Sequence[int]]]:
    """These inputs, each with the number of writes that the write-back counts, and the outputs whose backward reads it."""
    read: dict[Any, set[torch.fx.Node]] = {}
    for reader in joint.nodes_of("backward"):
        for argument in reader.all_input_nodes:
            if argument.meta.get("phase") == "forward" and (memory := memory_of(argument)) is not None:
                read.setdefault(memory, set()).add(reader)
    found: list[tuple[int, int, Sequence[int]]] = []
    for item in joint.spec.mutations:
        node: Any = joint.results[item.output_index]
        while node is not None and memory_of(node) not in read and str(node.target).endswith(_SCATTERS):
            # A symbolic index comes after the source.
            node = node.args[1]
        if node is not None and node.target is not operator.getitem and memory_of(node) in read:
            found.append((item.input_index, item.counted, _outputs_that_lead_to(read[memory_of(node)], joint)))
    return found


def _outputs_that_lead_to(readers: set[torch.fx.Node], joint: JointGraph) -> list[int]:
    """The places of the tangents without which no gradient reads these nodes; of all of them where that is not known."""
    reached: dict[torch.fx.Node, set[int]] = {node: {index} for index, node in enumerate(joint.tangents)}
    for node in joint.nodes_of("backward"):
        reached[node] = set().union(*(reached.get(argument, ()) for argument in node.all_input_nodes))
    found: set[int] = set()
    known, left = set(readers), list(readers)
    while left:
        node = left.pop()
        found |= reached.get(node, set())
        if not reached.get(node):
            # A factor that is computed from saved values only, as the cosine for a sine.
            left += [user for user in node.users if user not in known]
            known.update(node.users)
    return sorted(found)
