"""The records of compiled functions in a report, as plain data: read from entries and events, and kept when those are gone.

Nothing here refers to a model or a tensor, and all of it is bounded: a program may run for days.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import UserLocation
from dovetail.events import Event, EventLog
from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.dispatcher import Dispatcher
from dovetail.face.warnings import name_of
from dovetail.frontend.code.points import ResumePoint, location_of
from dovetail.frontend.code.resumption import Resumption
from dovetail.options import Options
from dovetail.reports.graphs_as_data import Room, describe_graphs, place_as_data
from dovetail.runtime.entry import Entry

#: How much of each kind a function's part of a report holds; the rest is counted and left out.
MOST_ENTRIES, MOST_GUARDS, MOST_SPANS, MOST_ROWS, MOST_TEXT = 400, 2_000, 400, 300, 2_000
_NO_DECISIONS = ("graph break", "recompile")


@dataclass
class PartRecord:
    """A function, or its code after one graph break, with its entries as data."""

    label: str
    where: UserLocation | None
    entries: list[dict[str, Any]] = field(default_factory=list)


class FunctionRecord:
    """One compiled function. :meth:`look` takes in new entries; :meth:`as_data` gives the content of the report."""

    def __init__(self, name: str, place: UserLocation | None, options: Options, log: EventLog, seconds: float) -> None:
        self.name = name
        self.left_out = 0
        self._place = place
        self._options = options
        self.log = log
        self._parts: dict[ResumePoint, PartRecord] = {}
        self._known: weakref.WeakKeyDictionary[Entry, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._room = Room(seconds=seconds)

    @classmethod
    def of(cls, compiled: CompiledFunction, seconds: float = 0.0) -> FunctionRecord:
        """All that is there of a compiled function."""
        record = cls.begun(compiled, seconds)
        for dispatcher in (compiled, *compiled.continuations()):
            record.look(dispatcher)
        return record

    @classmethod
    def begun(cls, dispatcher: Dispatcher, seconds: float = 0.0) -> FunctionRecord:
        """A record with no entries yet; ``seconds`` are for measuring them."""
        function = inspect.unwrap(dispatcher.original) if callable(dispatcher.original) else dispatcher.original
        log = dispatcher.events
        return cls(log.owner or name_of(function), _place_of(function), dispatcher.options, log, seconds)

    def look(self, dispatcher: Dispatcher) -> None:
        """Take in the entries of a function, or of its code after a graph break, that are not there yet."""
        point = dispatcher.original.point if isinstance(dispatcher.original, Resumption) else ()
        part = self._parts.get(point)
        if part is None:
            where = location_of(point) if point else self._place
            label = f"after the graph break, from line {where.line}" if point and where else "from the start"
            part = self._parts[point] = PartRecord(label, where)
        for entry in reversed(dispatcher.entries):
            if entry not in self._known:
                if sum(len(item.entries) for item in self._parts.values()) >= MOST_ENTRIES:
                    self.left_out += 1
                    self._known[entry] = {}
                    continue
                self._known[entry] = _describe_entry(entry, self._room)
                part.entries.append(self._known[entry])

    def as_data(self) -> dict[str, Any]:
        """The record as JSON can hold it."""
        for entry, known in list(self._known.items()):
            if known:
                known.update(_state_of(entry, self._room))
        events = self.log.events
        timeline = _timeline(events)
        fields = dataclasses.fields(Options)
        chosen = {item.name: getattr(self._options, item.name) for item in fields}
        return {
            "name": self.name,
            "where": place_as_data(self._place),
            "options": {name: short(value) for name, value in chosen.items() if value != getattr(Options(), name)},
            "parts": [
                {"label": part.label, "where": place_as_data(part.where), "entries": part.entries}
                for _, part in sorted(self._parts.items(), key=lambda item: bool(item[0]))
            ],
            "entries_left_out": self.left_out,
            "breaks": list(_breaks(events)),
            "recompiles": [
                {"reason": short(event.details.get("reason")), "start": event.start}
                for event in events
                if event.name == "recompile"
            ][-MOST_ROWS:],
            "decisions": [
                short(event) for event in events if event.duration is None and event.name not in _NO_DECISIONS
            ][-MOST_ROWS:],
            "cache": [short(event) for event in events if "cache" in " ".join((event.name, *event.details))][
                -MOST_ROWS:
            ],
            "timeline": timeline,
            "end": max((row["start"] + (row["seconds"] or 0.0) for row in timeline), default=0.0),
            "events_dropped": self.log.dropped,
            "seconds": {event.name: self.log.seconds(event.name) for event in events if event.duration is not None},
        }


def short(value: object, most: int = MOST_TEXT) -> str:
    """A value as a text of bounded length; errors of the program's own objects are not passed on."""
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001  (a __str__ of the user's)
        text = f"<{type(value).__name__}, whose text cannot be had: {type(error).__name__}>"
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"


def _place_of(function: Any) -> UserLocation | None:
    """The line at which a function, or the forward of a module, begins."""
    code = getattr(function, "__code__", None) or getattr(getattr(type(function), "forward", None), "__code__", None)
    return None if code is None else UserLocation(code.co_filename, code.co_firstlineno, code.co_name)


def _describe_entry(entry: Entry, room: Room) -> dict[str, Any]:
    """The part of an entry that never changes: its guards and graphs."""
    frozen = entry.checker.guards
    shown = frozen.guards[:MOST_GUARDS]
    found: dict[str, Any] = {
        "reason": entry.reason,
        "ends_at_break": entry.resume_point is not None,
        "guards": [
            {"text": short(item), "where": place_as_data(item.location), "reason": short(item.reason)} for item in shown
        ],
        "inputs": [
            {"name": item.source.name, "is": short(_facts(item.facts)), "where": place_as_data(item.location)}
            for item in frozen.tensors[:MOST_GUARDS]
        ],
        "guards_left_out": max(0, len(frozen.guards) - len(shown)),
        "effects": [short(effect, 200) for effect in entry.effects[:MOST_ROWS]],
    }
    if entry.compiled is not None:
        found |= describe_graphs(entry, room)
    return found


def _facts(facts: Any) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in facts.shape)
    gradient = ", requires grad" if facts.requires_grad else ""
    return f"{str(facts.dtype).removeprefix('torch.')}[{sizes}] on {facts.device}{gradient}"


def _state_of(entry: Entry, room: Room) -> dict[str, Any]:
    """The part of an entry that may change while the program runs."""
    compiled, tier = entry.compiled, getattr(entry.run, "tier", None)
    if entry.run is None:
        return {"state": "runs eagerly"}
    state = "up to a graph break" if entry.resume_point is not None else "the whole call"
    found: dict[str, Any] = {"state": state, "tier": "" if tier is None else f"tier {tier}: {entry.run.state}"}  # type: ignore[attr-defined,union-attr]
    if compiled is not None:
        found["backend"] = compiled.backend.name
        kernels = room.kernels_of(compiled.joint)
        if kernels:
            found["kernels"] = kernels
    return found


def _breaks(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Graph breaks, each reason at each place once, with how often it was met."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        if event.name == "graph break":
            reason, where = short(event.details.get("reason")), event.details.get("where")
            row = rows.setdefault((reason, str(where)), {"reason": reason, "times": 0})
            row["times"] += 1
            row["where"] = place_as_data(where)
            row["stack"] = [place_as_data(item) for item in getattr(where, "stack", ())]
            row["advice"] = short(event.details.get("advice") or "")
    yield from list(rows.values())[:MOST_ROWS]


def _timeline(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The longest stages and all graph breaks and recompiles, in the order in which they began; seconds from the first."""
    spans = sorted((item for item in events if item.duration is not None), key=lambda item: -(item.duration or 0))
    notes = [item for item in events if item.name in _NO_DECISIONS]
    chosen = sorted([*spans[:MOST_SPANS], *notes[-MOST_ROWS:]], key=lambda item: (item.start, -(item.duration or 0)))
    if not chosen:
        return []
    begin, threads = chosen[0].start, list(dict.fromkeys(item.thread for item in chosen))
    rows: list[dict[str, Any]] = []
    open_until: list[tuple[int, float]] = []
    for event in chosen:
        open_until = [item for item in open_until if item[0] != event.thread or item[1] > event.start]
        depth = sum(thread == event.thread for thread, _ in open_until)
        if event.duration is not None:
            open_until.append((event.thread, event.start + event.duration))
        rows.append(
            {
                "name": event.name,
                "start": event.start - begin,
                "seconds": event.duration,
                "depth": depth,
                "thread": threads.index(event.thread),
                "details": short(", ".join(f"{key}={short(value, 300)}" for key, value in event.details.items())),
            }
        )
    return rows
