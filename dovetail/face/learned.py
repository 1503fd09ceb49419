"""Facts that captures have learned: shared by a compiled function and its continuations, read by every later attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.backends import Backend
from dovetail.events import EventLog
from dovetail.frontend.code.points import ResumePoint
from dovetail.frontend.sizes.size_changes import SizeChanges
from dovetail.options import Options
from dovetail.trace import Findings


@dataclass(frozen=True)
class PartLearned:
    """Facts about one part: its sizes and numbers that change, and whether it needed symbols for sizes that data decides."""

    changes: SizeChanges = field(default_factory=SizeChanges)
    needs_data_sizes: bool = False


@dataclass(frozen=True)
class Learned:
    """Facts about a compiled function; replaced as a whole, never changed in place.

    ``without`` names strategies that were given up, ``observed`` holds values that rules have noted in earlier captures
    (:meth:`dovetail.trace.trace.Trace.changes`), ``reported`` are reasons and places that the user was told of. ``parts`` are the
    function (by the key ``()``) and its continuations by their resume points.
    ``sizes_vary``: code runs for real in a loop over a size that changes, so that what follows is compiled for all sizes.
    """

    without: frozenset[str] = frozenset()
    observed: Mapping[Hashable, Any] = field(default_factory=dict)
    reported: frozenset[tuple[str, str]] = frozenset()
    parts: Mapping[ResumePoint, PartLearned] = field(default_factory=dict)
    sizes_vary: bool = False


class SharedState:
    """State that a compiled function and its continuations share; written while ``compile_lock`` is held."""

    def __init__(self, backend: Backend, owner: str = "") -> None:
        self.backend = backend
        self.events = EventLog(owner=owner)
        self.learned = Learned()

    def learn(self, **changes: Any) -> None:
        """Replace facts about the whole function."""
        self.learned = dataclasses.replace(self.learned, **changes)

    def part(self, point: ResumePoint) -> PartLearned:
        """The facts about a part."""
        return self.learned.parts.get(point, PartLearned())

    def learn_part(self, point: ResumePoint, **changes: Any) -> None:
        """Replace facts about a part."""
        self.learn(parts={**self.learned.parts, point: dataclasses.replace(self.part(point), **changes)})

    def learn_findings(self, point: ResumePoint, findings: Findings) -> None:
        """Note the findings of an attempt at a part, whether it succeeded or not."""
        if findings.observed:
            self.learn(observed={**self.learned.observed, **findings.observed})
        if findings.changing_numbers:
            self.learn_part(point, changes=self.part(point).changes.with_numbers(findings.changing_numbers))

    def is_news(self, reason: str, where: object) -> bool:
        """Whether the user was not yet told of this reason at this place; from now on, they were."""
        key = (reason, str(where))
        is_news = key not in self.learned.reported
        self.learn(reported=self.learned.reported | {key})
        return is_news


@dataclass(frozen=True)
class Part:
    """A function, or its code after one graph break, as an attempt sees it.

    ``point`` is the resume point of code after a graph break, and ``()`` for a function from its start.
    ``is_for_all_sizes``: all sizes are symbolic from the first capture on. ``made_at_break`` names arguments that the instruction
    at the graph break has made, ``changing`` the numbers among them that are others at every pass.
    """

    function: Any
    options: Options
    shared: SharedState
    point: ResumePoint = ()
    is_for_all_sizes: bool = False
    made_at_break: frozenset[str] = frozenset()
    changing: frozenset[str] = frozenset()
