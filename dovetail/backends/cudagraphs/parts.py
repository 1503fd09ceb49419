"""Cutting a graph into parts that can be recorded and parts that cannot, as few as data flow allows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.backends.cudagraphs.obstacles import needs_kernel
from dovetail.backends.mutations import Memory, is_pure_function, written_arguments
from dovetail.backends.protocol import output_arguments
from dovetail.torch_private import operators as private_operators

Node = torch.fx.Node


@dataclass(frozen=True)
class Part:
    """A piece of a graph as a graph of its own: ``inputs`` and ``outputs`` are nodes of the whole graph."""

    graph: torch.fx.GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    recorded: bool


def cut(graph: torch.fx.GraphModule, can_record: Callable[[Node], bool]) -> list[Part]:
    """The parts of a graph in the order in which they run; each holds only nodes that ``can_record``, or only others.

    A part without any work for the device is never recorded. Operators that draw random numbers, have no schema, or touch
    memory that is written to keep their order among each other.
    """
    groups = _schedule(graph, can_record)
    results = {node for node in output_arguments(graph) if isinstance(node, Node)}
    parts = []
    for index, (recorded, nodes) in enumerate(groups):
        later = results | {
            value for _, others in groups[index + 1 :] for node in others for value in node.all_input_nodes
        }
        parts.append(_part(graph, nodes, later, recorded and any(map(needs_kernel, nodes))))
    return parts


def _is_ordered(node: Node) -> bool:
    target = node.target
    if not isinstance(target, private_operators.OpOverload):
        return not is_pure_function(target)
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def _schedule(graph: torch.fx.GraphModule, can_record: Callable[[Node], bool]) -> list[tuple[bool, list[Node]]]:
    work = [node for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    memory = Memory(graph)
    written = {memory.group(value) for node in work for value in written_arguments(node)}
    before: dict[Node, set[Node]] = {}
    last: Node | None = None
    for node in work:
        before[node] = {value for value in node.all_input_nodes if value.op not in ("placeholder", "get_attr")}
        touched = (node, *node.all_input_nodes)
        if _is_ordered(node) or (written and any(memory.group(value) in written for value in touched)):
            if last is not None:
                before[node].add(last)
            last = node
    kind: dict[Node, bool] = {}
    for node in work:
        # A result of several values stays with the operator that made it: only tensors go from part to part.
        source = node.args[0] if node.target is operator.getitem else None
        kind[node] = kind[source] if isinstance(source, Node) and source in kind else can_record(node)
    return min((_grouped(work, kind, before, first) for first in (False, True)), key=len)


def _grouped(
    work: Sequence[Node], kind: Mapping[Node, bool], before: Mapping[Node, set[Node]], first: bool
) -> list[tuple[bool, list[Node]]]:
    """Nodes of one kind for as long as there are any that can run, then those of the other kind."""
    groups: list[tuple[bool, list[Node]]] = []
    waiting, done, current = list(work), set[Node](), first
    while waiting:
        taken: list[Node] = []
        rest: list[Node] = []
        for node in waiting:
            if kind[node] == current and before[node] <= done:
                taken.append(node)
                done.add(node)
            else:
                rest.append(node)
        if taken:
            groups.append((current, taken))
        waiting, current = rest, not current
    return groups


def _part(graph: torch.fx.GraphModule, nodes: Sequence[Node], later: set[Node], recorded: bool) -> Part:
    inside = set(nodes)
    made = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    inputs: list[Node] = []
    needed = dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in inside)
    for value in needed:
        if value.op == "get_attr":
            continue
        copies[value] = made.placeholder(value.name)
        copies[value].meta = dict(value.meta)
        inputs.append(value)
    for value in needed:
        if value.op == "get_attr":
            copies[value] = made.node_copy(value)
    for node in nodes:
        copies[node] = made.node_copy(node, lambda value: copies[value])
        copies[node].meta = dict(node.meta)
    outputs = [node for node in nodes if node in later]
    made.output([copies[node] for node in outputs])
    return Part(torch.fx.GraphModule(graph, made), tuple(inputs), tuple(outputs), recorded)


def run_parts(
    graph: torch.fx.GraphModule, parts: Sequence[Part], runs: Sequence[Callable[[list[Any]], list[Any]]]
) -> Callable[[list[Any]], list[Any]]:
    """A callable for the whole graph that calls each part's callable, and drops every value after its last use."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    results = output_arguments(graph)
    # Values lie in one list: inputs first, then what each part makes, then what the results have besides.
    places: dict[Node, int] = {}
    for node in (*placeholders, *(node for part in parts for node in part.outputs)):
        places.setdefault(node, len(places))
    extra: list[Any] = []
    found: list[int] = []
    for entry in results:
        if isinstance(entry, Node) and entry in places:
            found.append(places[entry])
            continue
        found.append(len(places) + len(extra))
        extra.append(_attribute(graph, str(entry.target)) if isinstance(entry, Node) else entry)
    last_use: dict[int, int] = {}
    for index, part in enumerate(parts):
        for node in part.outputs:
            last_use.setdefault(places[node], index)
        for node in part.inputs:
            last_use[places[node]] = index
    needed = set(found)
    unused = [place for place in range(len(placeholders)) if place not in last_use and place not in needed]
    calls = []
    for index, (part, call) in enumerate(zip(parts, runs, strict=True)):
        gone = [place for place, last in last_use.items() if last == index and place not in needed]
        taken = [places[node] for node in part.inputs]
        first = places[part.outputs[0]] if part.outputs else 0
        made = slice(first, first + len(part.outputs))
        # An output that nobody asks for is dropped once it is there.
        calls.append((call, taken, [place for place in gone if place < first], made, [p for p in gone if p >= first]))
    room = [None] * (len(places) - len(placeholders))

    def run(inputs: list[Any]) -> list[Any]:
        values = [*inputs, *room, *extra]
        inputs.clear()
        for place in unused:
            values[place] = None
        for call, taken, before, made, after in calls:
            given = [values[place] for place in taken]
            for place in before:
                values[place] = None
            values[made] = call(given)
            for place in after:
                values[place] = None
        return [values[place] for place in found]

    return run


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
