"""The events of a compiled function as a file that trace viewers open, and as a table for a notebook."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

from dovetail.events import EventLog


def write_trace(log: EventLog, path: str | os.PathLike[str]) -> Path:
    """Write the events in the Chrome trace format; see :meth:`dovetail.events.EventLog.write_trace`."""
    rows: list[dict[str, Any]] = []
    for event in log.events:
        row: dict[str, Any] = {
            "name": event.name,
            "cat": "dovetail",
            "ts": event.start * 1e6,
            "pid": os.getpid(),
            "tid": event.thread,
            "args": {key: str(value) for key, value in event.details.items()},
        }
        if event.duration is None:
            row |= {"ph": "i", "s": "t"}
        else:
            row |= {"ph": "X", "dur": event.duration * 1e6}
        rows.append(row)
    target = Path(path)
    other = {"dropped events": log.dropped}
    text = json.dumps({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": other})
    target.write_text(text, encoding="utf-8")
    return target


def as_table(log: EventLog) -> str:
    """The events as a table of HTML: name, milliseconds, details."""
    rows = []
    for event in log.events:
        details = "<br>".join(html.escape(f"{key}: {value}") for key, value in event.details.items())
        took = "" if event.duration is None else f"{event.duration * 1e3:.1f}"
        rows.append(f"<tr><td>{html.escape(event.name)}</td><td>{took}</td><td>{details}</td></tr>")
    return f"<p>{log.title()}</p><table><tr><th>event</th><th>ms</th><th></th></tr>{''.join(rows)}</table>"
