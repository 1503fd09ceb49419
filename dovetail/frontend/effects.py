"""Writes to Python objects that existed before the trace: made for real, journalled, undone, replayed by the entry.

A container (a list, a dictionary, an object's ``__dict__``, a set or a closure cell) is copied before its first write. At the
end of the trace :meth:`Effects.undo` puts every copy back and :meth:`Effects.collect` says what the final state was.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.frontend.frame import Break
from dovetail.guards import Source

MISSING = object()


def dict_base(container: dict[Any, Any]) -> Any:
    """The builtin class whose methods write a dictionary past its own class: an ordered one keeps a list of its keys."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


@dataclass
class Record:
    """One container that was written to: its state before, and the keys written (dictionaries).

    A list that was only appended to is ``append_only``: ``before`` is then its length, and none of its items was read.
    """

    container: Any
    source: Source
    before: Any
    written: set[Any] = field(default_factory=set)
    append_only: bool = False


@dataclass(frozen=True)
class Effect:
    """The final state of one container: replaced contents of a list, set or cell, or changed items of a dictionary."""

    source: Source
    kind: str
    values: Any
    deleted: tuple[Any, ...] = ()


class Effects:
    """The journal of one trace."""

    def __init__(self, source_of: Callable[[Any], Source | None]) -> None:
        self._source_of = source_of
        self._records: dict[int, Record] = {}
        # Reads the items that a list had before; whoever asks about a list that was appended to will read it.
        self.read_items: Callable[[list[Any], Source, list[Any]], None] = lambda container, source, items: None

    def append(self, container: list[Any], value: Any) -> None:
        """``container.append(value)``, without reading what is in the list: a history may grow from call to call."""
        record = self._records.get(id(container))
        source = self._source_of(container)
        if record is None and source is not None:
            self._records[id(container)] = Record(container, source, len(container), append_only=True)
        list.append(container, value)

    def _settle(self, record: Record) -> None:
        """Make an ordinary record of one that was only appended to."""
        record.append_only = False
        record.before = record.container[: record.before]
        self.read_items(record.container, record.source, record.before)

    def written(self, container: Any, key: Any = MISSING) -> bool:
        """Whether a container (or one key of a dictionary) was written to in this trace."""
        record = self._records.get(id(container))
        if record is None:
            return False
        if record.append_only:
            self._settle(record)
        return key is MISSING or not isinstance(container, dict) or key in record.written

    def touch(self, container: Any) -> Record | None:
        """Copy a container before its first write. A container made in the trace needs no journal."""
        record = self._records.get(id(container))
        if record is not None:
            if record.append_only:
                self._settle(record)
            return record
        source = self._source_of(container)
        if source is None:
            return None
        if isinstance(container, types.CellType):
            try:
                before: Any = container.cell_contents
            except ValueError:
                before = MISSING
        elif isinstance(container, dict):
            before = dict(container)
        elif isinstance(container, list):
            before = list(container)
        elif isinstance(container, set):
            before = set(container)
        else:
            raise Break(f"a {type(container).__name__} that existed before the call is written to")
        record = self._records[id(container)] = Record(container, source, before)
        return record

    def set_item(self, container: Any, key: Any, value: Any) -> None:
        """``container[key] = value`` on a list or dictionary, without the class's own ``__setitem__``."""
        record = self.touch(container)
        if isinstance(container, dict):
            if record is not None:
                record.written.add(key)
            dict_base(container).__setitem__(container, key, value)
        else:
            list.__setitem__(container, key, value)

    def delete_item(self, container: Any, key: Any) -> None:
        """``del container[key]`` on a list or dictionary."""
        record = self.touch(container)
        if isinstance(container, dict):
            if record is not None:
                record.written.add(key)
            dict_base(container).__delitem__(container, key)
        else:
            list.__delitem__(container, key)

    def touch_all(self, container: Any) -> None:
        """Before a native method that may write any part of the container."""
        record = self.touch(container)
        if record is not None and isinstance(container, dict):
            record.written.update(container)

    def set_cell(self, cell: types.CellType, value: Any) -> None:
        """Write a closure cell."""
        self.touch(cell)
        cell.cell_contents = value

    def undo(self) -> None:
        """Put everything back as it was before the trace."""
        for record in reversed(self._records.values()):
            container, before = record.container, record.before
            if isinstance(container, types.CellType):
                if before is MISSING:
                    del container.cell_contents
                else:
                    container.cell_contents = before
            elif isinstance(container, dict):
                dict_base(container).clear(container)
                dict_base(container).update(container, before)
            elif record.append_only:
                del container[before:]
            elif isinstance(container, list):
                list.__setitem__(container, slice(None), before)
            else:
                container.clear()
                container.update(before)

    def collect(self) -> tuple[Effect, ...]:
        """The final state of every container that ended up different; call before :meth:`undo`."""
        effects: list[Effect] = []
        for record in self._records.values():
            container, before = record.container, record.before
            if isinstance(container, types.CellType):
                effects.append(Effect(record.source, "cell", container.cell_contents))
            elif isinstance(container, dict):
                changed = {
                    key: value for key, value in container.items() if key not in before or before[key] is not value
                }
                deleted = tuple(key for key in before if key not in container)
                if changed or deleted:
                    effects.append(Effect(record.source, "dict", changed, deleted))
            elif record.append_only:
                effects.append(Effect(record.source, "append", container[before:]))
            elif isinstance(container, list):
                if len(before) != len(container) or any(a is not b for a, b in zip(before, container, strict=True)):
                    effects.append(Effect(record.source, "list", list(container)))
            elif before != container:
                effects.append(Effect(record.source, "set", set(container)))
        return tuple(effects)
