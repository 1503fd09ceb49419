"""A compiled graph as data for a report: its operators by source line, the user's source around them, and the saved values."""

from __future__ import annotations

import linecache
import os
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.partition import PartitionedGraph
from dovetail.backends.inductor.generated import code_of
from dovetail.errors import UserLocation
from dovetail.reports.cost import bytes_moved, flops_of, memory_of_call, saved_values
from dovetail.reports.joint_graphs import describe_value, operation_text, summarise
from dovetail.reports.measured import machine_of, measure
from dovetail.runtime.entry import Entry

_MOST_ARGUMENTS = 400
_AROUND = 3
#: Points of the picture of memory, and rows of each table of measured times.
_MOST_POINTS, _MOST_ROWS = 600, 300


class Room:
    """How much a report may still hold: operators, lines of source, and characters of generated code; seconds to measure."""

    def __init__(
        self, nodes: int = 60_000, lines: int = 60_000, characters: int = 6_000_000, seconds: float = 0.0
    ) -> None:
        self.nodes, self.lines, self.characters, self.seconds = nodes, lines, characters, seconds
        self._files: dict[str, str] = {}

    def kernels_of(self, joint: JointGraph) -> list[dict[str, Any]]:
        """The code that Inductor has generated for a graph, as far as there is room for it."""
        found = []
        for item in code_of(joint.fake_mode):
            if item.file not in self._files:
                self._files[item.file] = self._read(item.file)
            found.append({**asdict(item), "code": self._files[item.file]})
        return found

    def _read(self, file: str) -> str:
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"# the file cannot be read: {error}"
        if len(text) > self.characters:
            return f"# left out, the report is full: {len(text):,} characters in {file}"
        self.characters -= len(text)
        return text


def place_as_data(place: UserLocation | None) -> dict[str, Any] | None:
    """A place in the user's source as JSON can hold it."""
    if place is None:
        return None
    found = {"file": place.names[-1](place.file), "line": place.line, "function": place.function, "text": place.text}
    return found | {"module": place.module} if place.module else found


def describe_graphs(entry: Entry, room: Room) -> dict[str, Any]:
    """Forward and backward as rows, with their source lines, their memory, and the measured times."""
    compiled: CompiledGraph = entry.compiled
    joint, parts = compiled.joint, compiled.partitioned
    found: dict[str, Any] = {"summary": summarise(joint), "passes": [str(record) for record in joint.provenance]}
    if parts is not None:
        found["saved"] = _saved(parts)
        found["saved_bytes"] = parts.saved_bytes
        found["computed_again"] = len(parts.recomputed_nodes)
    count = len(joint.graph.nodes)
    if count > room.nodes:
        return found | {"graphs_left_out": f"the report is full; this graph has {count:,} nodes"}
    room.nodes -= count
    lines: dict[tuple[str, int], int] = {}
    modules: dict[str, int] = {}
    functions: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
    for phase in ("forward", "backward"):
        found[phase] = [_row(node, lines, modules, functions) for node in joint.nodes_of(phase)]
    found["lines"] = [list(key) for key in lines]
    found["modules"] = list(modules)
    found["source"] = _source(functions, room)
    found["memory"] = _memory(compiled)
    if room.seconds > 0:
        begin = time.monotonic()
        found["measured"] = _measured(entry, found)
        room.seconds -= time.monotonic() - begin
    return found


def _memory(compiled: CompiledGraph) -> dict[str, Any]:
    """The bytes that are alive over a step, the highest of each stretch of operators."""
    memory = memory_of_call(compiled)
    step = -(-len(memory.alive) // _MOST_POINTS) or 1
    starts = range(0, len(memory.alive), step)
    highest = [
        max(range(start, start + step)[: len(memory.alive) - start], key=memory.alive.__getitem__) for start in starts
    ]
    found: dict[str, Any] = {
        "inputs": memory.inputs,
        "peak": memory.peak,
        "operators": len(memory.nodes),
        "forward": memory.forward,
    }
    if highest:
        node = memory.nodes[max(highest, key=memory.alive.__getitem__)]
        found["at"] = {"name": node.name, "where": place_as_data(node.meta.get("user_line"))}
    points = [[index, memory.alive[index], memory.saved[index]] for index in highest]
    return {**found, "points": points}


def _measured(entry: Entry, shown: dict[str, Any]) -> dict[str, Any]:
    """The cost of each operator by itself, as the last item of its row, and the sums by module, line and operator.

    Each sum is its name, seconds in forward and backward, floating-point operations, bytes, and the number of operators.
    """
    joint, measured = entry.compiled.joint, measure(entry)
    sums: dict[str, dict[Any, list[Any]]] = {"modules": {}, "lines": {}, "operators": {}}
    for place, phase in enumerate(("forward", "backward")):
        for node, row in zip(joint.nodes_of(phase), shown[phase], strict=True):
            seconds = measured.seconds.get(node.name, 0.0)
            row.append(seconds)
            name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
            for kind, key in (("modules", shown["modules"][row[4]]), ("lines", row[3]), ("operators", name)):
                own = sums[kind].setdefault(key, [key, 0.0, 0.0, 0, 0, 0])
                for index, value in ((1 + place, seconds), (3, flops_of(node)), (4, bytes_moved(node)), (5, 1)):
                    own[index] += value
    found: dict[str, Any] = {
        kind: sorted(rows.values(), key=lambda row: -row[1] - row[2])[:_MOST_ROWS] for kind, rows in sums.items()
    }
    whole = {name: getattr(measured, name) for name in ("forward", "backward", "peak_memory", "problem")}
    machine = asdict(machine_of(joint, flops_of)) if measured.seconds else None
    return {**found, **whole, "not_run": list(measured.not_run[:_MOST_ROWS]), "machine": machine}


def _row(
    node: torch.fx.Node,
    lines: dict[tuple[str, int], int],
    modules: dict[str, int],
    functions: defaultdict[str, dict[str, list[int]]],
) -> list[Any]:
    """Name, value, operation, number of the line (-1: unknown) and of the module."""
    place: UserLocation | None = node.meta.get("user_line")
    line = -1
    if place is not None:
        line = lines.setdefault((place.names[-1](place.file), place.line), len(lines))
        functions[place.file].setdefault(place.function, []).append(place.line)
    module = modules.setdefault("" if place is None else place.module, len(modules))
    operation = operation_text(node)
    if len(operation) > _MOST_ARGUMENTS:
        operation = f"{operation[:_MOST_ARGUMENTS]} …"
    return [node.name, describe_value(node.meta.get("val"))[:_MOST_ARGUMENTS], operation, line, module]


def _source(functions: defaultdict[str, dict[str, list[int]]], room: Room) -> list[dict[str, Any]]:
    """Of each file, the lines of its functions that operators come from, and a few around them."""
    found = []
    for file, by_function in functions.items():
        # The text of now; the module may have been edited since it was imported, which shows in its lines.
        text = linecache.getlines(file)
        wanted: set[int] = set()
        for numbers in by_function.values():
            wanted.update(range(max(1, min(numbers) - _AROUND), min(len(text), max(numbers) + _AROUND) + 1))
        kept = sorted(wanted)[: max(0, room.lines)]
        room.lines -= len(kept)
        rows = [[number, text[number - 1].rstrip("\r\n")] for number in kept]
        name = UserLocation.names[-1](file)
        found.append({"file": name, "name": os.path.basename(name), "rows": rows})
    return found


def _saved(parts: PartitionedGraph) -> list[dict[str, Any]]:
    """The values that the forward keeps for the backward, the largest memory first; each memory is counted once."""
    rows: list[dict[str, Any]] = [
        {
            "name": node.name,
            "is": describe_value(node.meta.get("val")),
            "what": str(descriptor),
            "bytes": size,
            "where": place_as_data(node.meta.get("user_line")),
        }
        for (node, size), descriptor in zip(saved_values(parts), parts.saved, strict=False)
    ]
    return sorted(rows, key=lambda row: -row["bytes"])[:5_000]
