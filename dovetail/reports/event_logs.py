"""The events of a compiled function as a file that trace viewers open, and as a table for a notebook."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from typing import Any

from dovetail.events import Event, EventLog
from dovetail.reports.table import Table


def as_trace(logs: Sequence[EventLog]) -> str:
    """The events of functions as one trace; see :func:`trace_rows`."""
    rank = os.environ.get("RANK")
    process = _name("process", 0, f"Dovetail, process {os.getpid()}" + (f", rank {rank}" if rank else ""))
    other = {"dropped events": sum(log.dropped for log in logs)}
    return json.dumps({"traceEvents": [process, *trace_rows(logs)], "displayTimeUnit": "ms", "otherData": other})


def trace_rows(logs: Sequence[EventLog]) -> list[dict[str, Any]]:
    """The rows of a trace, with a track for each function in each thread."""
    rows: list[dict[str, Any]] = []
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    for log in logs:
        tracks: dict[int, int] = {}
        events = log.events
        # An event belongs to the compilation that ends next; of those, the ones that are dropped came first.
        number = log.count("compile") - sum(event.name == "compile" for event in events)
        for event in events:
            if event.thread not in tracks:
                tracks[event.thread] = len(rows) + 1
                name = threads.get(event.thread, f"thread {event.thread}")
                rows.append(_name("thread", len(rows) + 1, f"{log.owner} ({name})"))
            rows.append(_row(event, tracks[event.thread], log.owner, number))
            number += event.name == "compile"
    return rows


def _name(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": os.getpid(), "tid": track, "args": {"name": name}}


def _row(event: Event, track: int, function: str, number: int) -> dict[str, Any]:
    args = {"function": function, "compilation": number, **{key: str(value) for key, value in event.details.items()}}
    stack = getattr(event.details.get("where"), "stack", ())
    if stack:
        args["stack"] = "\n".join(map(str, stack))
    row = {
        "name": event.name,
        "cat": "dovetail",
        "ts": event.start * 1e6,
        "pid": os.getpid(),
        "tid": track,
        "args": args,
    }
    return row | ({"ph": "i", "s": "t"} if event.duration is None else {"ph": "X", "dur": event.duration * 1e6})


def as_table(log: EventLog) -> str:
    """The events as a table of HTML: name, milliseconds, details."""
    rows = [
        (
            event.name,
            "" if event.duration is None else f"{event.duration * 1e3:.1f}",
            ", ".join(f"{key}: {value}" for key, value in event.details.items()),
        )
        for event in log.events
    ]
    return f"<p>{log.title()}</p>{Table(('event', 'ms', ''), tuple(rows)).to_html()}"
