"""The code after a graph break: the instruction that broke the graph runs for real, what follows is compiled like any function."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.face.dispatcher import Dispatcher
from dovetail.face.learned import Part, SharedState
from dovetail.face.warnings import count
from dovetail.frontend.code.frame import decode
from dovetail.frontend.code.points import ResumePoint, flatten, names_of_values, unflatten
from dovetail.frontend.code.resumption import Resumption
from dovetail.frontend.interpreter.generator import cleans_up
from dovetail.frontend.interpreter.machine import Machine
from dovetail.options import Options
from dovetail.runtime.entry import Completed

#: Asked with the continuations and the resume point when a call has come to so many parts: whether later calls are captured anew.
LONG_CALLS: list[Callable[[Continuations, ResumePoint], bool]] = []
MANY_PARTS = 16


@dataclass(frozen=True)
class _Suspended:
    """A continuation has come to a graph break: the point and the live values there."""

    point: ResumePoint
    values: tuple[Any, ...]


class Continuation(Dispatcher):
    """The code of a function after a graph break, with entries of its own. Its arguments are the values that live at the break."""

    def __repr__(self) -> str:
        return f"<continuation {self.original.__qualname__}: {count(self.entries, 'compiled entry')}>"

    def _go_on(self, point: ResumePoint, results: list[Any]) -> Any:
        values = results.pop()
        # The loop of ``Continuations.run`` goes on: a program with a break in a loop needs no deep stack.
        return values.result if isinstance(values, Completed) else _Suspended(point, values)


class Continuations:
    """The continuations of one compiled function, by resume point. They are made when they are first reached.

    ``are_outdated``: a call has learned something by which later calls are captured anew.
    """

    def __init__(self, options: Options, shared: SharedState) -> None:
        self._options = options
        self.shared = shared
        self.are_outdated = False
        self._by_point: dict[ResumePoint, Continuation] = {}

    def __iter__(self) -> Iterator[Continuation]:
        return iter(list(self._by_point.values()))

    def run(self, point: ResumePoint, results: list[Any]) -> Any:
        """Run the instruction at a graph break for real, then the code after it; over and over where that breaks again.

        ``results`` holds the live values; they are taken out, so that nobody but the code that goes on refers to them.
        """
        values = results.pop()
        if isinstance(values, Completed):
            return values.result
        for count_of_parts in itertools.count():
            frames = unflatten(point, values)
            if any(map(cleans_up, values)):
                # Its ``finally`` runs as soon as nobody refers to it; a graph would hold all of its arguments to its end.
                self.shared.events.note("graph break", reason="a suspended generator has cleaning up to do", where=None)
                values = None
                gc.collect()
                return Machine().run(frames)
            if count_of_parts == MANY_PARTS and any(ask(self, point) for ask in LONG_CALLS):
                self.are_outdated, values = True, ()
                return Machine().run(frames)
            returned = Machine().step_to_work(frames)
            if not frames:
                return returned
            before, live = point, values
            point, values = flatten(frames)
            following = self._by_point.get(point) or self._make(
                before, live, Resumption(point, names_of_values(point)), values
            )
            live = None
            del frames
            outcome = following(*values)
            if not isinstance(outcome, _Suspended):
                return outcome
            point, values, outcome = outcome.point, outcome.values, None

    def _make(
        self, before: ResumePoint, live: tuple[Any, ...], resumption: Resumption, values: tuple[Any, ...]
    ) -> Continuation:
        """The continuation that is first reached from the break at ``before``, where the values were ``live``."""
        made = names_made_at_break(live, names_of_values(before), values, resumption.names)
        last = before[-1]
        kinds = (int, float) if decode(last.code).instructions[last.position].opname == "FOR_ITER" else (float,)
        named = zip(resumption.names, values, strict=True)
        changing = frozenset(name for name, value in named if name in made and type(value) in kinds)
        # Code that is first reached after sizes have changed will see them change too.
        learned = self.shared.learned
        for_all_sizes = learned.sizes_vary or any(part.changes.sizes for part in learned.parts.values())
        part = Part(resumption, self._options, self.shared, resumption.point, for_all_sizes, made, changing)
        # Another thread may have come here at the same time.
        return self._by_point.setdefault(resumption.point, Continuation(part))


_CONSTANTS = (int, bool, float, complex, str, bytes, type(None))


def names_made_at_break(
    before: Sequence[Any], names_before: Sequence[str], after: Sequence[Any], names_after: Sequence[str]
) -> frozenset[str]:
    """The names of values that the instruction at a graph break has made: they were not there before it.

    Constants have no identity; a constant was there before if the same name had an equal one.
    """

    def key(name: str, value: Any) -> Any:
        return (name, type(value), value) if type(value) in _CONSTANTS else id(value)

    known = set(map(key, names_before, before))
    return frozenset(name for name, value in zip(names_after, after, strict=True) if key(name, value) not in known)
