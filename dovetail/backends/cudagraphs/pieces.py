"""Cutting a graph into recordable pieces and pieces that run as they are, as few as data flow allows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.backends.cudagraphs.obstacles import needs_kernel
from dovetail.backends.protocol import CompiledCallable, output_arguments
from dovetail.passes.mutations import Memory, is_pure_function, written_arguments
from dovetail.torch_private import operators as private_operators

Node = torch.fx.Node


@dataclass(frozen=True)
class Piece:
    """A part of a graph as a graph of its own; ``inputs`` and ``outputs`` are nodes of the whole graph."""

    graph: torch.fx.GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    is_recordable: bool


def cut(graph: torch.fx.GraphModule, can_record: Callable[[Node], bool]) -> list[Piece]:
    """Return the pieces of a graph in the order in which they run; ``can_record`` holds for all nodes of a piece, or for none.

    A piece without any work for the device is not recordable. Operators that draw random numbers, have no schema, or touch
    memory that is written to keep their order among each other.
    """
    groups = _schedule(graph, can_record)
    pieces: list[Piece] = []
    later = {node for node in output_arguments(graph) if isinstance(node, Node)}
    for recorded, nodes in reversed(groups):
        pieces.append(_piece(graph, nodes, later, recorded and any(map(needs_kernel, nodes))))
        later = later.union(*(node.all_input_nodes for node in nodes))
    return pieces[::-1]


def _is_ordered(node: Node) -> bool:
    target = node.target
    if not isinstance(target, private_operators.OpOverload):
        return not is_pure_function(target)
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def _schedule(graph: torch.fx.GraphModule, can_record: Callable[[Node], bool]) -> list[tuple[bool, list[Node]]]:
    """Return the nodes of each piece in order, with whether it can be recorded."""
    work = [node for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    memory = Memory(graph)
    written = memory.groups(value for node in work for value in written_arguments(node))
    before: dict[Node, set[Node]] = {}
    recordable: dict[Node, bool] = {}
    last: Node | None = None
    for node in work:
        before[node] = {value for value in node.all_input_nodes if value.op not in ("placeholder", "get_attr")}
        touches_written = written and any(memory.group(value) in written for value in (node, *node.all_input_nodes))
        if touches_written or _is_ordered(node):
            if last is not None:
                before[node].add(last)
            last = node
        # A result of several values stays in the piece of its operator: only tensors pass between pieces.
        source = node.args[0] if node.target is operator.getitem else None
        recordable[node] = recordable[source] if source in recordable else can_record(node)  # type: ignore[index]
    return min((_grouped(work, recordable, before, first) for first in (False, True)), key=len)


def _grouped(
    work: Sequence[Node], recordable: Mapping[Node, bool], before: Mapping[Node, set[Node]], first: bool
) -> list[tuple[bool, list[Node]]]:
    """Take nodes of one kind for as long as one of them can run, then nodes of the other kind, and so on."""
    groups: list[tuple[bool, list[Node]]] = []
    waiting, done, current = list(work), set[Node](), first
    while waiting:
        taken: list[Node] = []
        rest: list[Node] = []
        for node in waiting:
            if recordable[node] == current and before[node] <= done:
                taken.append(node)
                done.add(node)
            else:
                rest.append(node)
        if taken:
            groups.append((current, taken))
        waiting, current = rest, not current
    return groups


def _piece(graph: torch.fx.GraphModule, nodes: Sequence[Node], later: set[Node], is_recordable: bool) -> Piece:
    inside = set(nodes)
    made = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    needed = dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in inside)
    inputs = [value for value in needed if value.op != "get_attr"]
    for value in inputs:
        copies[value] = made.placeholder(value.name)
        copies[value].meta = dict(value.meta)
    for value in needed:
        if value.op == "get_attr":
            copies[value] = made.node_copy(value)
    for node in nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    outputs = [node for node in nodes if node in later]
    made.output([copies[node] for node in outputs])
    return Piece(torch.fx.GraphModule(graph, made), tuple(inputs), tuple(outputs), is_recordable)


def run_pieces(
    graph: torch.fx.GraphModule, pieces: Sequence[Piece], runs: Sequence[CompiledCallable]
) -> CompiledCallable:
    """Return a callable for the whole graph that runs the pieces, and drops every value before its last use."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    entries = output_arguments(graph)
    results = [entry for entry in entries if isinstance(entry, Node)]
    constants = {node: operator.attrgetter(str(node.target))(graph) for node in results if node.op == "get_attr"}
    last_use = dict.fromkeys(placeholders, 0)
    for index, piece in enumerate(pieces):
        last_use.update(dict.fromkeys(piece.inputs, index))
    gone: list[list[Node]] = [[] for _ in pieces]
    for node, index in last_use.items():
        if pieces and node not in results:
            gone[index].append(node)
    calls = [(run, piece.inputs, piece.outputs, nodes) for run, piece, nodes in zip(runs, pieces, gone, strict=True)]

    def run_all(inputs: list[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip(placeholders, inputs, strict=True))
        inputs.clear()
        for run, needed, made, unneeded in calls:
            given = [values[node] for node in needed]
            for node in unneeded:
                del values[node]
            values.update(zip(made, run(given), strict=True))
        values |= constants
        return [values[entry] if isinstance(entry, Node) else entry for entry in entries]

    return run_all
