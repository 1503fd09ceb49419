"""Timing and decision events: what Dovetail did, why, where in the user's code and how long it took.

An :class:`EventLog` collects :class:`Event` values. Stages are timed with :meth:`EventLog.span`, decisions are noted with
:meth:`EventLog.note`. A log writes itself as a trace file that Perfetto (https://ui.perfetto.dev) opens.

>>> log = EventLog()
>>> with log.span("capture", function="f"):
...     log.note("graph break", reason="print")
>>> [event.name for event in log.events]
['graph break', 'capture']
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """One thing that happened: ``start`` and ``duration`` in seconds (``duration`` is None for a decision)."""

    name: str
    start: float
    duration: float | None
    details: dict[str, Any] = field(default_factory=dict)
    thread: int = 0

    def __str__(self) -> str:
        took = "" if self.duration is None else f" {self.duration * 1e3:.1f} ms"
        details = ", ".join(f"{key}={value}" for key, value in self.details.items())
        return f"{self.name}{took}" + (f" ({details})" if details else "")


class EventLog:
    """An append-only list of events, safe to use from several threads."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Event], None]] = []

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, in the order in which they ended."""
        with self._lock:
            return tuple(self._events)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call ``listener(event)`` for every event from now on."""
        self._listeners.append(listener)

    def note(self, name: str, **details: Any) -> None:
        """Record a decision (an event without a duration)."""
        self._add(Event(name, time.perf_counter(), None, details, threading.get_ident()))

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[dict[str, Any]]:
        """Time the body of a ``with`` block; the block may add details to the dictionary that it is given."""
        start = time.perf_counter()
        try:
            yield details
        finally:
            self._add(Event(name, start, time.perf_counter() - start, details, threading.get_ident()))

    def seconds(self, name: str) -> float:
        """Total duration, in seconds, of all spans of this name."""
        return sum(event.duration or 0.0 for event in self.events if event.name == name)

    def count(self, name: str) -> int:
        """How many events of this name there are."""
        return sum(event.name == name for event in self.events)

    def write_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the events in the Chrome trace format, which Perfetto opens; times there are in microseconds."""
        rows: list[dict[str, Any]] = []
        for event in self.events:
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
        target.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}), encoding="utf-8")
        return target

    def _add(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(event)
