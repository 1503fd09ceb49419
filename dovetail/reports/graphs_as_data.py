"""A compiled graph as data for a report: its operators by source line, the user's source around them, and what is saved."""

from __future__ import annotations

import linecache
import os
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import kept_anyway, memory_kept_by
from dovetail.backends.inductor.generated import code_of
from dovetail.errors import UserLocation
from dovetail.reports.joint_graphs import describe_value, operation_text, summarise

_MOST_ARGUMENTS = 400
_AROUND = 3


class Room:
    """How much a report may still hold: operators, lines of source, and characters of generated code."""

    def __init__(self, nodes: int = 60_000, lines: int = 60_000, characters: int = 6_000_000) -> None:
        self.nodes, self.lines, self.characters = nodes, lines, characters
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
    found = {"file": place.file, "line": place.line, "function": place.function, "text": place.text}
    return found | {"module": place.module} if place.module else found


def describe_graphs(compiled: CompiledGraph, room: Room) -> dict[str, Any]:
    """Forward and backward as rows, the source that they come from, and the values saved between them."""
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
    return found


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
        line = lines.setdefault((place.file, place.line), len(lines))
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
        found.append({"file": file, "name": os.path.basename(file), "rows": rows})
    return found


def _saved(parts: Any) -> list[dict[str, Any]]:
    """The values that the forward keeps for the backward, the largest memory first; each memory is counted once."""
    if parts.backward is None:
        return []
    nodes = parts.backward.graph.find_nodes(op="placeholder")[: len(parts.saved)]
    free, seen, rows = kept_anyway(parts.forward.graph), set(), []
    for node, descriptor in zip(nodes, parts.saved, strict=False):
        memory = memory_kept_by(node, free)
        size = 0 if memory is None or memory[0] in seen else memory[1]
        if memory is not None:
            seen.add(memory[0])
        place = place_as_data(node.meta.get("user_line"))
        rows.append(
            {
                "name": node.name,
                "is": describe_value(node.meta.get("val")),
                "what": str(descriptor),
                "bytes": size,
                "where": place,
            }
        )
    return sorted(rows, key=lambda row: -row["bytes"])[:5_000]
