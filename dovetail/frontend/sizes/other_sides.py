"""Capturing a call a second time at sizes that it does not have, for the branches that it does not take."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.events import EventLog
from dovetail.frontend.breaks.situations import formulas_of, sizes_near
from dovetail.frontend.breaks.symbols import Expected, Situation
from dovetail.frontend.code.frame import Break
from dovetail.guards import FETCH_ERRORS, Equals, NumberSource
from dovetail.runtime.entry import Entry
from dovetail.torch_private import recordings as private_recordings
from dovetail.trace.other_sides import OtherSide, Proposals, stand_in
from dovetail.trace.shapes import NUMBER_SUFFIX

Sizes = Mapping[str, Mapping[int, int]]
_MOST_SECONDS = 60.0
_NUMBER = "a number is "
_TODAY = Expected()


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
        self._constants: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, list[torch.Tensor | None]] = {}

    def of(self, entry: Entry, existing: Sequence[Entry] = ()) -> list[Entry]:
        """The entries for other sides of the comparisons that this one made, and of those that the others made; none for sizes
        that one of the existing entries serves.
        """
        is_quick = self._is_quick()
        known = [entry]
        waiting: deque[tuple[Entry, Sizes]] = deque([(entry, {})])
        while waiting and is_quick:
            current, sizes = waiting.popleft()
            for side in self._proposals(current, sizes):
                merged = {**sizes, **{name: {**sizes.get(name, {}), **dims} for name, dims in side.sizes.items()}}
                if any(self._fits(other, merged) for other in (*known, *existing)):
                    continue
                if self._limit <= 0:
                    return known[1:]
                self._limit -= 1
                found = self._try(side, merged)
                if found is not None:
                    known.append(found)
                    waiting.append((found, merged))
        return known[1:]

    def of_expected(
        self,
        entry: Entry,
        existing: Sequence[Entry],
        expected: Iterable[Expected],
        compile_as: Callable[[Expected], Entry],
    ) -> list[Entry]:
        """Entries for what the part before a graph break hands on where it takes its own other sides.

        These sizes and numbers belong together: a padding of 0 comes with a length that is a multiple already, and with no
        other. So each is captured as a whole, or not at all where two tensors share their memory.
        """
        found: list[Entry] = []
        for item in expected:
            if any(self._serves(other, item) for other in (entry, *found)):
                continue
            if any(self._serves(other, item) and _is_for_all(other, item) for other in existing):
                continue
            if not self._can_resize(entry, item):
                self._events.note(
                    "no entry for another side", sizes=str(item), because="two tensors share their memory"
                )
                continue
            if self._limit <= 0:
                break
            self._limit -= 1
            because: str | None
            try:
                other = compile_as(item)
            except (Break, Exception) as error:  # noqa: BLE001  (as for sizes)
                because = f"{type(error).__name__}: {str(error)[:300]}"
            else:
                because = None if self._serves(other, item) else "its guards do not hold at these sizes"
            if because is None:
                found.append(other)
                self._events.note("another side", sizes=str(item))
            else:
                self._events.note("no entry for another side", sizes=str(item), because=because)
        return found

    def of_near(
        self, entry: Entry, known: Sequence[Entry], near: Iterable[Expected], compile_as: Callable[[Expected], Entry]
    ) -> list[Entry]:
        """Entries for what the part before a graph break hands on at other sizes, where no entry is for it.

        A number that is 0 or 1 is no symbol; of all else, what a single size needs for itself is left alone.
        """
        left = [item for item in near if not any(self._serves(other, item) for other in (entry, *known))]
        kinds: dict[str, list[Expected]] = {}
        for item in left:
            kinds.setdefault(self._obstacle(entry, item), []).append(item)
        numbers = [kind for kind in kinds if kind.startswith(_NUMBER)]
        many = [kind for kind, items in kinds.items() if kind not in numbers and len(items) > 1]
        many.sort(key=lambda kind: -len(kinds[kind]))
        found: list[Entry] = []
        # A number that is 0 or 1 is as likely as any other; the rest is a guess.
        for kind in [*numbers, *(many if self._is_quick() else ())]:
            for item in kinds[kind]:
                if any(self._serves(other, item) for other in found):
                    continue
                new = self.of_expected(entry, [], [item], compile_as)
                found += new
                if not new or kind in numbers:
                    break
        return found

    def handed_on(
        self, entries: Sequence[Entry], expected: Iterable[Expected], near: Sequence[Expected]
    ) -> Iterator[tuple[Any, Situation, bool]]:
        """What entries that end at a graph break hand on there: the place, the situation, and whether that is only near."""
        formulas = {id(entry): formulas_of(entry) for entry in entries}
        if not near:
            today = self._tensors(entries[0], _TODAY)
            near = [] if today is None else list(sizes_near(entries[0], today))
        for is_near, given in [*((False, item) for item in (_TODAY, *expected)), *((True, item) for item in near)]:
            entry = next((item for item in entries if self._serves(item, given)), None)
            found = None if entry is None else formulas[id(entry)]
            tensors = None if entry is None else self._tensors(entry, given)
            if entry is None or found is None or tensors is None:
                continue
            with contextlib.suppress(ArithmeticError):
                yield entry.resume_point, found.at(tensors).with_passed(given), is_near

    def _is_quick(self) -> bool:
        seconds = next((item.duration for item in reversed(self._events.events) if item.name == "compile"), None)
        return seconds is not None and seconds < _MOST_SECONDS

    def _obstacle(self, entry: Entry, given: Expected) -> str:
        """Why an entry is not for these sizes and numbers."""
        guards = entry.checker.guards
        for item in guards.tensors:
            name = item.source.name.removesuffix(NUMBER_SUFFIX)
            if isinstance(item.source, NumberSource) and given.numbers.get(name) in (0, 1):
                return f"{_NUMBER}{given.numbers[name]}"
        tensors = self._tensors(entry, given)
        failures = [] if tensors is None or guards.shapes is None else guards.shapes.failures(tensors)
        return failures[0][0] if failures else "another one"

    def _proposals(self, entry: Entry, sizes: Sizes) -> list[OtherSide]:
        tensors = self._resized(entry, sizes)
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
        if not self._fits(found, sizes):
            self._note("no entry for another side", side, because="its guards do not hold at these sizes")
            return None
        self._note("another side", side)
        return found

    def _note(self, name: str, side: OtherSide, **details: Any) -> None:
        self._events.note(name, sizes=str(side), instead_of=side.condition, where=side.where, **details)

    def _serves(self, entry: Entry, given: Expected) -> bool:
        """Whether these sizes and numbers are ones that an entry was made for."""
        guards = entry.checker.guards
        constants = self._constants_of(entry)
        if any(constants.get(name, number) != number for name, number in given.numbers.items()):
            return False
        tensors = self._tensors(entry, given)
        if tensors is None or (guards.shapes is not None and not guards.shapes.holds(tensors)):
            return False
        # Sizes that are no symbols in this entry: 1, say, or one that it was not told of.
        return all(
            then is None or then == now
            for item, tensor in zip(guards.tensors, tensors, strict=True)
            if item.source.name in given.layouts
            for then, now in zip(item.facts.shape, tensor.shape, strict=True)
        )

    def _constants_of(self, entry: Entry) -> dict[str, Any]:
        """The whole numbers that an entry was made for, by the names of their sources."""
        found = self._constants.get(id(entry))
        if found is None:
            found = self._constants[id(entry)] = {
                guard.source.name: guard.predicate.value
                for guard in entry.checker.guards.guards
                if isinstance(guard.predicate, Equals) and type(guard.predicate.value) is int
            }
        return found

    def _can_resize(self, entry: Entry, given: Expected) -> bool:
        """Whether no input that is to have another size shares its memory with another input."""
        tensors = self._tensors(entry, _TODAY)
        if tensors is None:
            return False
        memory = [private_recordings.storage_key(item.untyped_storage()) for item in tensors]
        names = [item.source.name for item in entry.checker.guards.tensors]
        return all(memory.count(key) == 1 for key, name in zip(memory, names, strict=True) if name in given.layouts)

    def _tensors(self, entry: Entry, given: Expected) -> list[torch.Tensor] | None:
        """The inputs of an entry at this call, those with other sizes by empty ones."""
        found: list[torch.Tensor] = []
        for item, tensor in zip(entry.checker.guards.tensors, self._fetched(entry), strict=True):
            name = item.source.name if given.layouts or isinstance(item.source, NumberSource) else ""
            number = given.numbers.get(name.removesuffix(NUMBER_SUFFIX))
            layout = given.layouts.get(name)
            try:
                if number is not None and isinstance(item.source, NumberSource):
                    found.append(item.source.read(number))
                elif tensor is None:
                    return None
                elif layout is not None:
                    found.append(stand_in(tensor, dict(enumerate(layout[0])), torch.device("meta"), layout[1]))
                else:
                    found.append(tensor)
            except (CaptureError, ValueError):
                return None
        return found

    def _fetched(self, entry: Entry) -> list[torch.Tensor | None]:
        """The inputs of an entry at this call; None for what is not there. Asked for many times for each entry."""
        found = self._inputs.get(id(entry))
        if found is None:
            found = self._inputs[id(entry)] = []
            for item in entry.checker.guards.tensors:
                try:
                    found.append(item.source.fetch(*self._call))
                except FETCH_ERRORS:
                    found.append(None)
        return found

    def _resized(self, entry: Entry, sizes: Sizes) -> list[torch.Tensor] | None:
        """The inputs of an entry at this call, some with other sizes and their strides in the same order."""
        tensors = self._tensors(entry, _TODAY)
        if tensors is None:
            return None
        found = []
        for item, tensor in zip(entry.checker.guards.tensors, tensors, strict=True):
            dims = sizes.get(item.source.name)
            try:
                found.append(stand_in(tensor, dims, torch.device("meta")) if dims else tensor)
            except CaptureError:
                return None
        return found

    def _fits(self, entry: Entry, sizes: Sizes) -> bool:
        """Whether the sizes are ones that an entry was made for."""
        shapes, tensors = entry.checker.guards.shapes, self._resized(entry, sizes)
        return shapes is not None and tensors is not None and shapes.holds(tensors)


def _is_for_all(entry: Entry, given: Expected) -> bool:
    """Whether an entry takes other sizes too in the place of those that change; 0 and 1 are never symbols."""
    return all(
        item.facts.shape[dim] is None or item.facts.shape[dim] in (0, 1)
        for item in entry.checker.guards.tensors
        if item.source.name in given.layouts
        for dim in given.changing.get(item.source.name, ())
        if dim < len(item.facts.shape)
    )
