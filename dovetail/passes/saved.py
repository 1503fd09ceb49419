"""Passes that change how values are saved between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dovetail.aot.descriptors import BufferInput, ParamInput
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import IN_BACKWARD, SAVE, kept_anyway, memory_kept_by, memory_of
from dovetail.errors import OptionError
from dovetail.torch_private import sizes as private_sizes

aten = torch.ops.aten


def saved_nodes(joint: JointGraph) -> list[torch.fx.Node]:
    """The forward's values that the backward reads, largest first; without parameters, buffers and numbers."""
    free = kept_anyway(joint.graph)
    sizes: dict[torch.fx.Node, int] = {}
    for node in _readers(joint):
        found = memory_kept_by(node, free)
        if found is not None and not isinstance(node.meta.get("desc"), (ParamInput, BufferInput)):
            sizes[node] = found[1]
    return sorted(sizes, key=lambda node: -sizes[node])


def _readers(joint: JointGraph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """For each value of the forward that the backward reads: the operators there that read it."""
    dependent = set(joint.tangents)
    read: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in joint.graph.nodes:
        if node.op == "output":
            continue
        if node.meta.get(IN_BACKWARD) or any(argument in dependent for argument in node.all_input_nodes):
            dependent.add(node)
            for argument in node.all_input_nodes:
                if argument not in dependent:
                    read.setdefault(argument, []).append(node)
    return read


def _views_in_backward(joint: JointGraph) -> None:
    """Make views anew in the backward, so that it reads each of the forward's tensors under one name only."""
    while True:
        moved = False
        for node, readers in _readers(joint).items():
            memory = memory_of(node)
            if node.op != "call_function" or memory is None:
                continue
            if all(memory_of(base) != memory for base in node.all_input_nodes):
                continue
            with joint.graph.inserting_before(readers[0]):
                again = joint.graph.node_copy(node)
            again.meta = {**node.meta, "phase": "backward", IN_BACKWARD: True}
            for reader in readers:
                reader.replace_input_with(node, again)
            moved = True
        if not moved:
            return


def save_in_bfloat16(minimum_bytes: int = 1 << 16) -> Callable[[JointGraph], None]:
    """A pass: float32 values of at least ``minimum_bytes`` are kept for the backward as bfloat16, in half the memory.

    The forward stays as it is, and the gradients are those of slightly rounded activations. Values that are outputs or inputs of
    the function are alive anyway and kept as they are.
    """

    def shorten(joint: JointGraph) -> None:
        _views_in_backward(joint)
        alive = {*joint.results, *joint.graph.find_nodes(op="placeholder")}
        for node in saved_nodes(joint):
            value = node.meta["val"]
            large = value.dtype == torch.float32 and private_sizes.hint(value.numel()) * 4 >= minimum_bytes
            if large and node not in alive:
                _keep_as(joint, node, {"dtype": torch.bfloat16}, {"dtype": torch.float32})

    return shorten


def offload_saved(
    *, count: int | None = None, total_bytes: int | None = None, force: bool = False
) -> Callable[[JointGraph], None]:
    """A pass: the largest values that are kept for the backward wait in the CPU's memory, and go back to their device for it.

    ``count`` says how many, or ``total_bytes`` how much. Values that are on the CPU already stay where they are, unless
    ``force`` copies them all the same. Raises :class:`OptionError` unless exactly one of both is given.
    """
    if (count is None) == (total_bytes is None):
        raise OptionError("give either count or total_bytes")

    def offload(joint: JointGraph) -> None:
        free = kept_anyway(joint.graph)
        _views_in_backward(joint)
        alive = {*joint.results, *joint.graph.find_nodes(op="placeholder")}
        moved, done = 0, 0
        for node in saved_nodes(joint):
            device = node.meta["val"].device
            if node in alive or (device.type == "cpu" and not force):
                continue
            if (count is not None and done >= count) or (total_bytes is not None and moved >= total_bytes):
                return
            found = memory_kept_by(node, free)
            moved, done = moved + (found[1] if found is not None else 0), done + 1
            _keep_as(joint, node, {"device": torch.device("cpu")}, {"device": device}, always=True)

    return offload


def _keep_as(
    joint: JointGraph, node: torch.fx.Node, kept: dict[str, Any], back: dict[str, Any], *, always: bool = False
) -> None:
    """Keep a copy of a value for the backward instead of the value itself, and copy it back there."""
    readers = _readers(joint).get(node, [])
    if not readers:
        return
    copy = joint.call(aten._to_copy.default, node, **kept)
    copy.meta.update({"phase": "forward", SAVE: always})
    with joint.graph.inserting_before(readers[0]):
        again = joint.graph.call_function(aten._to_copy.default, (copy,), back)
    again.meta.update({"phase": "backward", IN_BACKWARD: True})
    for reader in readers:
        reader.replace_input_with(node, again)
