"""What captures have found out: shared by a compiled function and its continuations, read by every later attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dovetail.aot.capture_result import BreakSymbols, CaptureResult
from dovetail.backends import Backend
from dovetail.events import EventLog
from dovetail.frontend.code.points import ResumePoint
from dovetail.frontend.sizes.size_changes import SizeChanges
from dovetail.options import Options
from dovetail.trace import CaptureSettings, Findings
from dovetail.trace.settings import GRAPH_BREAKS

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Learned:
    """What is known of a compiled function; replaced as a whole, never changed in place.

    ``without`` names strategies that were given up, ``observed`` holds values that rules have noted in earlier captures
    (:meth:`dovetail.trace.trace.Trace.changes`). ``reported`` are reasons and places that the user was told of.

    By part: ``changes`` are its sizes and numbers that change, ``needs_data_sizes`` says that its last capture needed symbols for
    sizes that data decide. By resume point: ``break_symbols``, and ``made_at_breaks``, the positions of live values that the
    instruction at an earlier graph break has made. ``sizes_vary``: code runs for real in a loop over a size that changes, and what
    is compiled from then on is compiled for all sizes.
    """

    without: frozenset[str] = frozenset()
    observed: Mapping[Hashable, Any] = field(default_factory=dict)
    reported: frozenset[tuple[str, str]] = frozenset()
    changes: Mapping[ResumePoint, SizeChanges] = field(default_factory=dict)
    needs_data_sizes: frozenset[ResumePoint] = frozenset()
    break_symbols: Mapping[Hashable, BreakSymbols] = field(default_factory=dict)
    made_at_breaks: Mapping[Hashable, frozenset[int]] = field(default_factory=dict)
    sizes_vary: bool = False

    @property
    def has_changed_sizes(self) -> bool:
        """Whether any part was called with other sizes."""
        return any(changes.sizes for changes in self.changes.values())

    def changes_of(self, part: ResumePoint) -> SizeChanges:
        """The sizes and numbers of a part that change."""
        return self.changes.get(part, SizeChanges())

    def with_changes(self, part: ResumePoint, changes: SizeChanges) -> Learned:
        """The same with the changes of one part."""
        return dataclasses.replace(self, changes=_with(self.changes, part, changes))

    def with_findings(self, part: ResumePoint, findings: Findings) -> Learned:
        """The same after an attempt, whether it succeeded or not."""
        learned = self
        if findings.observed:
            learned = dataclasses.replace(learned, observed={**learned.observed, **findings.observed})
        if findings.changing_numbers:
            learned = learned.with_changes(part, learned.changes_of(part).with_numbers(findings.changing_numbers))
        return learned

    def with_data_sizes(self, part: ResumePoint, needs: bool) -> Learned:
        """The same, where a part does or does not need symbols for sizes that data decide."""
        others = self.needs_data_sizes - {part}
        return dataclasses.replace(self, needs_data_sizes=others | {part} if needs else others)

    def with_settings(self, settings: CaptureSettings) -> Learned:
        """The same with the strategies that an attempt has given up."""
        # That graph breaks are errors is an option of the user's, and nothing learned.
        return dataclasses.replace(self, without=settings.without - {GRAPH_BREAKS})

    def with_report(self, reason: str, where: object) -> Learned:
        """The same with a reason and place that the user was told of."""
        return dataclasses.replace(self, reported=self.reported | {(reason, str(where))})

    def was_reported(self, reason: str, where: object) -> bool:
        """Whether the user was told of this reason at this place."""
        return (reason, str(where)) in self.reported

    def with_capture(self, capture: CaptureResult, made: frozenset[str]) -> Learned:
        """The same after a capture has succeeded. ``made`` are names of values that were made at a graph break before it."""
        point, symbols = capture.resume_point, capture.break_symbols
        if symbols is None:
            return self
        positions = frozenset(position for position, name in symbols.unchanged.items() if name in made)
        return dataclasses.replace(
            self,
            break_symbols=_with(
                self.break_symbols, point, symbols.merged(self.break_symbols.get(point, BreakSymbols()))
            ),
            made_at_breaks=_with(self.made_at_breaks, point, positions | self.made_at_breaks.get(point, frozenset())),
        )


def _with(table: Mapping[_Key, _Value], key: Any, value: _Value) -> Mapping[_Key, _Value]:
    return {**table, key: value}


class SharedState:
    """The one place that a compiled function and its continuations share: what was learned, the events and the backend.

    ``learned`` is replaced while ``compile_lock`` is held.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.events = EventLog()
        self.learned = Learned()


@dataclass(frozen=True)
class Part:
    """A function, or its code after one graph break, as an attempt sees it.

    ``point`` is the resume point of code after a graph break, and ``()`` for a function from its start. ``refuses_inputs``: an
    input that cannot be captured is an error; code after a graph break falls back to eager instead. ``is_for_all_sizes``: all sizes
    are symbolic from the first capture on. ``made_at_break`` names arguments that the instruction at the graph break has made.
    """

    function: Any
    options: Options
    shared: SharedState
    point: ResumePoint = ()
    refuses_inputs: bool = True
    is_for_all_sizes: bool = False
    made_at_break: frozenset[str] = frozenset()
