"""Timing and decision events: what Dovetail did, why, where in the user's code and how long it took.

An :class:`EventLog` collects :class:`Event` values. Stages are timed with :meth:`EventLog.span`, decisions are noted with
:meth:`EventLog.note`.

>>> log = EventLog()
>>> with log.span("capture", function="f"):
...     log.note("graph break", reason="print")
>>> [event.name for event in log.events]
['graph break', 'capture']
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

_MOST_SHOWN = 50
#: How a log is shown to a reader; loaded when it is asked for.
_PAGES = "dovetail.reports.event_logs"


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
    """The latest events, safe to use from several threads.

    Of more than ``limit`` events the oldest are dropped; ``dropped`` says how many. :meth:`count` and :meth:`seconds` count
    dropped ones too.

    >>> log = EventLog(limit=2)
    >>> for reason in ("print", "input", "open"):
    ...     log.note("graph break", reason=reason)
    >>> log
    3 events (1 earlier one dropped)
      graph break (reason=input)
      graph break (reason=open)
    >>> log.count("graph break")
    3
    """

    listeners: ClassVar[list[Callable[[EventLog, Event], None]]] = []  # called with the log and each event

    def __init__(self, limit: int = 4096, owner: str = "") -> None:
        self.owner = owner
        self._events: deque[Event] = deque(maxlen=limit)
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @property
    def events(self) -> tuple[Event, ...]:
        """The events that are kept, in the order in which they ended."""
        with self._lock:
            return tuple(self._events)

    @property
    def dropped(self) -> int:
        """The number of events that are no longer kept."""
        return sum(self._counts.values()) - len(self._events)

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
        return self._seconds.get(name, 0.0)

    def count(self, name: str) -> int:
        """The number of events of this name."""
        return self._counts.get(name, 0)

    def _add(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            self._counts[event.name] += 1
            self._seconds[event.name] += event.duration or 0.0
        for listener in self.listeners:
            listener(self, event)

    def title(self) -> str:
        """The number of events, in words."""
        text = f"{sum(self._counts.values())} events"
        return text + (f" ({self.dropped} earlier one{'s' * (self.dropped > 1)} dropped)" if self.dropped else "")

    def __repr__(self) -> str:
        events = self.events
        left_out = len(events) - _MOST_SHOWN
        lines = [f"  … {left_out} of them left out here …"] if left_out > 0 else []
        return "\n".join([self.title(), *lines, *(f"  {event}" for event in events[-_MOST_SHOWN:])])

    def _repr_html_(self) -> str:
        """A table for a notebook: name, milliseconds, details."""
        return str(importlib.import_module(_PAGES).as_table(self))
