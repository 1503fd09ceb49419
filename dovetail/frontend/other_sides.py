"""Capturing a call a second time at sizes that it does not have, for the branches that it does not take."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.events import EventLog
from dovetail.frontend.frame import Break
from dovetail.guards import FETCH_ERRORS
from dovetail.runtime.entry import Entry
from dovetail.trace.other_sides import OtherSide, Proposals, stand_in
from dovetail.trace.shapes import NUMBER_SUFFIX

Sizes = Mapping[str, Mapping[int, int]]
_MOST_SECONDS = 30.0


class OtherSides:
    """What is compiled together with an entry. ``compile_at(sizes)`` compiles the same call at other sizes.

    ``limit`` is how often that is tried, also where it fails: a check that raises is a branch too. An entry that took long to
    compile is left alone: its other sides would take as long. ``unrolls``: loops are unrolled, so that their rounds are sides too.
    """

    def __init__(
        self,
        compile_at: Callable[[Sizes], Entry],
        call: tuple[Any, tuple[Any, ...], Mapping[str, Any]],
        limit: int,
        events: EventLog,
        unrolls: bool = False,
    ) -> None:
        self._unrolls = unrolls
        self._compile_at = compile_at
        self._call = call
        self._limit = limit
        self._events = events

    def of(self, entry: Entry, existing: Sequence[Entry] = ()) -> list[Entry]:
        """The entries for other sides of the comparisons that this one made, and of those that the others made; none for sizes
        that one of the existing entries serves.
        """
        seconds = next((item.duration for item in reversed(self._events.events) if item.name == "compile"), None)
        known = [entry]
        waiting: deque[tuple[Entry, Sizes]] = deque([(entry, {})])
        while waiting and seconds is not None and seconds < _MOST_SECONDS:
            current, sizes = waiting.popleft()
            for side in self._proposals(current, sizes):
                merged = {**sizes, **{name: {**sizes.get(name, {}), **dims} for name, dims in side.sizes.items()}}
                if any(self._serves(other, merged) for other in (*known, *existing)):
                    continue
                if self._limit <= 0:
                    return known[1:]
                self._limit -= 1
                found = self._try(side, merged)
                if found is not None:
                    known.append(found)
                    waiting.append((found, merged))
        return known[1:]

    def of_numbers(
        self,
        entry: Entry,
        numbers: Iterable[frozenset[str]],
        compile_with: Callable[[Mapping[str, int]], Entry],
    ) -> list[Entry]:
        """Entries for 0 and 1 in the place of each of these numbers (all names of it), where it is a symbol in this entry."""
        found: list[Entry] = []
        symbolic = {item.source.name.removesuffix(NUMBER_SUFFIX) for item in entry.checker.guards.tensors}
        chosen = [names for names in numbers if symbolic & names]
        for names, number in itertools.product(chosen, (0, 1)):
            if self._limit <= 0:
                break
            self._limit -= 1
            shown = f"{' and '.join(sorted(names))} = {number}"
            try:
                found.append(compile_with(dict.fromkeys(names, number)))
            except (Break, Exception) as error:  # noqa: BLE001  (as for sizes)
                because = f"{type(error).__name__}: {str(error)[:300]}"
                self._events.note("no entry for another side", sizes=shown, because=because)
            else:
                self._events.note("another side", sizes=shown)
        return found

    def _proposals(self, entry: Entry, sizes: Sizes) -> list[OtherSide]:
        tensors = self._tensors(entry, sizes)
        if tensors is None or entry.checker.guards.shapes is None:
            return []
        joint = entry.compiled.joint
        try:
            return list(Proposals(joint.fake_mode.shape_env, joint.capture.bindings, tensors, self._unrolls))
        except (CaptureError, ArithmeticError):
            # A comparison that cannot be computed, or not at these sizes.
            return []

    def _try(self, side: OtherSide, sizes: Sizes) -> Entry | None:
        try:
            found = self._compile_at(sizes)
        except (Break, Exception) as error:  # noqa: BLE001  (capture is a transaction; nobody has asked for this one)
            self._note("no entry for another side", side, because=f"{type(error).__name__}: {str(error)[:300]}")
            return None
        if not self._serves(found, sizes):
            self._note("no entry for another side", side, because="its guards do not hold at these sizes")
            return None
        self._note("another side", side)
        return found

    def _note(self, name: str, side: OtherSide, **details: Any) -> None:
        self._events.note(name, sizes=str(side), instead_of=side.condition, where=side.where, **details)

    def _serves(self, entry: Entry, sizes: Sizes) -> bool:
        """Whether the sizes are ones that an entry was made for."""
        shapes, tensors = entry.checker.guards.shapes, self._tensors(entry, sizes)
        return shapes is not None and tensors is not None and shapes.holds(tensors)

    def _tensors(self, entry: Entry, sizes: Sizes) -> list[torch.Tensor] | None:
        """The inputs of an entry at this call, those with other sizes by empty ones."""
        found = []
        for item in entry.checker.guards.tensors:
            try:
                tensor = item.source.fetch(*self._call)
                dims = sizes.get(item.source.name)
                found.append(stand_in(tensor, dims, torch.device("meta")) if dims else tensor)
            except FETCH_ERRORS:
                return None
            except CaptureError:
                return None
        return found
