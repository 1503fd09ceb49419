"""An entry and a compiled graph in words, and as pages of a notebook."""

from __future__ import annotations

import dataclasses
import html

from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.runtime.entry import Entry


def describe(entry: Entry) -> str:
    """Describe an entry in one line."""
    if entry.run is None:
        return f"entry that runs eagerly: {entry.reason.splitlines()[0] if entry.reason else 'no reason given'}"
    guards = len(entry.checker.guards.guards) + len(entry.checker.guards.tensors)
    end = "up to a graph break" if entry.resume_point is not None else "of the whole call"
    parts = [f"{guards} guards", f"{len(entry.effects)} effects"]
    if entry.compiled is not None:
        parts.insert(0, repr(entry.compiled).strip("<>"))
    return f"entry {end}: {', '.join(parts)}"


def compiled_by(graph: CompiledGraph) -> str:
    """The backend that has compiled a graph, and the values saved between forward and backward."""
    parts = graph.partitioned
    text = "the program, call by call" if parts is None else str(dataclasses.replace(parts, memory=graph.memory))
    return f"compiled by {graph.backend.name}: {text}"


def as_page(entry: Entry) -> str:
    """An entry for a notebook: guards, effects and graph to be unfolded."""
    lists = {"guards": entry.checker.guards.guards, "effects": entry.effects}
    shown = {name: "\n".join(map(str, items)) for name, items in lists.items() if items}
    if entry.reason:
        shown["reason"] = entry.reason
    if entry.compiled is not None:
        shown["graph"] = str(entry.compiled.joint)
    return _page(describe(entry), shown)


def graph_as_page(graph: CompiledGraph) -> str:
    """A compiled graph for a notebook, to be unfolded."""
    return _page(repr(graph).strip("<>"), {"saved": compiled_by(graph), "graph": str(graph.joint)})


def _page(head: str, texts: dict[str, str]) -> str:
    parts = (
        f"<details><summary>{name}</summary><pre>{html.escape(text)}</pre></details>" for name, text in texts.items()
    )
    return f"<p>{html.escape(head)}</p>{''.join(parts)}"
