"""Graphs of whole steps, which hold a forward and its backward: values that the backward reads are kept, or computed again.

Where the program runs the backward itself, nothing separates it from the forward, and a compiler keeps everything that both read
until the backward has come to it. The same minimum cut that splits a joint graph says what is worth keeping; the rest is
computed again, next to the operators that read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import torch

from dovetail.aot.nodes import BACKWARD_RUN, memory_of, writes_in_place
from dovetail.aot.steps import Lowering, after_partition
from dovetail.passes.minimum_cut import cost_of_keeping, is_fused, minimum_cut

Nodes = Collection[torch.fx.Node]


@after_partition
def plan_whole_step(lowering: Lowering) -> Lowering:
    """Compute again, where the backward is part of the forward's graph and the backend fuses."""
    parts = lowering.parts
    if lowering.is_training or lowering.backend.numerics == "bitwise" or parts is None:
        return lowering
    with lowering.settings.events.span("compute again") as details:
        again = compute_again_in_backward(parts.forward.graph)
        details["nodes"] = len(again)
    if not again:
        return lowering
    parts.forward.recompile()
    return lowering.with_(parts=dataclasses.replace(parts, recomputed_nodes=tuple(node.name for node in again)))


def compute_again_in_backward(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Compute cheap large values again in each backward; returns the new nodes."""
    if any(writes_in_place(node) for node in graph.nodes):
        # Computed after the write, a value may be another one.
        return []
    numbers = dict.fromkeys(node.meta.get(BACKWARD_RUN) for node in graph.nodes)
    made = []
    for number in reversed(numbers):
        if number is not None:
            made += _of_one_backward(graph, number)
    return made


def _of_one_backward(graph: torch.fx.Graph, number: int) -> list[torch.fx.Node]:
    before: dict[torch.fx.Node, None] = {}
    inside: dict[torch.fx.Node, None] = {}
    for node in graph.nodes:
        if node.meta.get(BACKWARD_RUN) == number:
            inside[node] = None
        elif not inside:
            before[node] = None
    readers: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in inside:
        for argument in node.all_input_nodes:
            if argument in before:
                readers.setdefault(argument, []).append(node)
    stored = {node for node in before if node.op == "placeholder" or _is_stored(node, before, inside)}
    # A stored value needs no second kernel that stores it; a cut behind it would ask for one.
    kept = {*minimum_cut(readers, lambda node: _cost(node, stored, before)), *stored}
    order = {node: position for position, node in enumerate(before)}
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for value, users in readers.items():
        if value in kept or not _holds_tensors(value):
            continue
        for node in sorted(_chain(value, kept), key=order.__getitem__):
            if node not in copies:
                with graph.inserting_before(users[0]):
                    copies[node] = graph.node_copy(node, lambda item: copies.get(item, item))
                copies[node].meta = {**node.meta, BACKWARD_RUN: number}
        for user in users:
            user.replace_input_with(value, copies[value])
    return list(copies.values())


def _holds_tensors(node: torch.fx.Node) -> bool:
    """Whether it is a computed tensor, or several; numbers cost nothing to keep."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _is_stored(node: torch.fx.Node, before: Nodes, inside: Nodes) -> bool:
    """Whether the value is in memory when the backward reads it there: it is read later, or by operators that take no part in
    fused kernels, on both sides.
    """
    users = list(_readers_through_views(node))
    if any(user not in before and user not in inside for user in users):
        return True
    apart = [user for user in users if not is_fused(user)]
    return any(user in before for user in apart) and any(user in inside for user in apart)


def _cost(node: torch.fx.Node, stored: Nodes, before: Nodes) -> int:
    if node in stored:
        return 1
    in_memory = not is_fused(node) or any(
        user in before and not is_fused(user) for user in _readers_through_views(node)
    )
    # A value that a fused kernel passes on without storing it costs a store besides the memory.
    return cost_of_keeping(node) * (1 if in_memory else 2)


def _readers_through_views(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    storage = memory_of(node)
    for user in node.users:
        if storage is not None and user.op == "call_function" and memory_of(user) == storage:
            yield from _readers_through_views(user)
        else:
            yield user


def _chain(value: torch.fx.Node, kept: Nodes) -> list[torch.fx.Node]:
    """The nodes that have to run again for a value."""
    found: dict[torch.fx.Node, None] = {}
    stack = [value]
    while stack:
        node = stack.pop()
        if node in found or node in kept or not _holds_tensors(node):
            continue
        found[node] = None
        stack.extend(node.all_input_nodes)
    return list(found)
