"""Inputs that are written to, and whose new values the backward reads: eager saves these inputs themselves.

A graph saves its own output, which a later write to the input does not reach; so the runtime notes the version.
"""

from __future__ import annotations

import operator
from typing import Any

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import memory_of
from dovetail.aot.steps import reads_later

_SCATTERS = tuple(f"{name}_scatter.default" for name in ("select", "slice", "diagonal", "as_strided"))


@reads_later
def read_later(joint: JointGraph) -> list[tuple[int, int]]:
    """These inputs, each with the number of writes that the write-back counts."""
    arguments = [argument for node in joint.nodes_of("backward") for argument in node.all_input_nodes]
    read = {memory_of(node) for node in arguments if node.meta.get("phase") == "forward"} - {None}
    found = []
    for item in joint.spec.mutations:
        node: Any = joint.results[item.output_index]
        while node is not None and memory_of(node) not in read and str(node.target).endswith(_SCATTERS):
            # A symbolic index comes after the source.
            node = node.args[1]
        if node is not None and node.target is not operator.getitem and memory_of(node) in read:
            found.append((item.input_index, item.counted))
    return found
