"""Writes to Python objects that existed before the trace: made for real, journalled, undone, replayed by the entry.

A container (a list, a dictionary, an object's ``__dict__``, a set or a closure cell) is copied before its first write. At the
end of the trace :meth:`Effects.undo` puts every copy back and :meth:`Effects.collect` says what the final state was.
"""

from __future__ import annotations

import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dovetail.frontend.code.frame import Break, Unread
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.values.values import is_leaf_value
from dovetail.guards import ItemSource, Source
from dovetail.guards.source import plain_items

MISSING = object()


def dict_base(container: dict[Any, Any]) -> Any:
    """The builtin class whose methods write a dictionary past its own class: an ordered one keeps a list of its keys."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


@dataclass
class Record:
    """One container that was written to: its state before, and the keys written (dictionaries).

    ``assigned`` are those of them (and the places of a list) that were written without a guard on what was there before: at
    another call that may be something else, so that these are written again even where the value is the one that was there.

    A list that was only appended to is ``append_only``: ``before`` is then its length, and none of its items was read.
    """

    container: Any
    source: Source
    before: Any
    written: set[Any] = field(default_factory=set)
    assigned: set[Any] = field(default_factory=set)
    append_only: bool = False


@dataclass(frozen=True)
class AttributeRecord:
    """One attribute of a class, or one slot, that was written to."""

    target: Any
    name: str
    source: Source
    before: Any


def own_attribute(target: Any, name: str) -> Any:
    """A class's own attribute, or what a slot holds; :data:`MISSING` where there is nothing."""
    if isinstance(target, type):
        return target.__dict__.get(name, MISSING)
    try:
        return object.__getattribute__(target, name)
    except AttributeError:
        return MISSING


def put_attribute(target: Any, name: str, value: Any) -> None:
    """Set an attribute past the class's own ``__setattr__``; with :data:`MISSING`, delete it."""
    base: Any = type if isinstance(target, type) else object
    if value is not MISSING:
        base.__setattr__(target, name, value)
    elif own_attribute(target, name) is not MISSING:
        base.__delattr__(target, name)


@dataclass(frozen=True)
class Effect:
    """The final state of one container: replaced contents of a list, set or cell, changed items of a dictionary (all of them
    where their order changed), what was appended to a list, or one attribute.
    """

    source: Source
    kind: str
    values: Any
    deleted: tuple[Any, ...] = ()


class Effects:
    """The journal of one trace."""

    def __init__(self, source_of: Callable[[Any], Source | None]) -> None:
        self._source_of = source_of
        self._records: dict[int, Record] = {}
        self._attributes: dict[tuple[int, str], AttributeRecord] = {}
        #: How often anything that existed before the trace was written to.
        self.writes = 0
        self._is_result: Callable[[Any], bool] | None = None
        # Reads the items that a list had before; whoever asks about a list that was appended to will read it.
        self.read_items: Callable[[list[Any], Source, list[Any]], None] = lambda container, source, items: None

    def close(self, is_result: Callable[[Any], bool]) -> None:
        """The forward has ended and is undone. What hooks and custom backwards do from now on must stay among themselves."""
        self._is_result = is_result

    def _check_open(self, container: Any) -> None:
        if self._is_result is not None and (self._source_of(container) is not None or self._is_result(container)):
            raise Break(
                "a hook or the backward of a custom autograd.Function writes to an object that exists outside of it",
                "keep what it finds in tensors that the function returns, or register the hook outside of the function",
            )

    def _check_unwritten(self) -> None:
        if self._is_result is not None:
            raise Break(
                "a hook or the backward of a custom autograd.Function reads what the forward has written",
                "hand it over as an argument, a closure variable or an attribute of ctx",
            )

    def append(self, container: list[Any], value: Any) -> None:
        """``container.append(value)``, without reading what is in the list: a history may grow from call to call."""
        self._check_open(container)
        record = self._records.get(id(container))
        source = self._source_of(container)
        if source is not None:
            self.writes += 1
            if record is None:
                self._records[id(container)] = Record(container, source, list.__len__(container), append_only=True)
        list.append(container, value)

    def _settle(self, record: Record) -> None:
        """Make an ordinary record of one that was only appended to."""
        record.append_only = False
        record.before = list.__getitem__(record.container, slice(record.before))
        self.read_items(record.container, record.source, record.before)

    def written(self, container: Any, key: Any = MISSING) -> bool:
        """Whether a container (or one key of a dictionary) was written to in this trace."""
        record = self._records.get(id(container))
        if record is None:
            return False
        self._check_unwritten()
        if record.append_only:
            self._settle(record)
        return key is MISSING or not isinstance(container, dict) or key in record.written

    def before(self, container: Any) -> Any:
        """A container as it was before the trace."""
        record = self._records.get(id(container))
        if record is None:
            return container
        self._check_unwritten()
        if record.append_only:
            self._settle(record)
        return record.before

    def touch(self, container: Any) -> Record | None:
        """Copy a container before its first write. A container made in the trace needs no journal."""
        self._check_open(container)
        record = self._records.get(id(container))
        if record is not None:
            self.writes += 1
            if record.append_only:
                self._settle(record)
            return record
        source = self._source_of(container)
        if source is None:
            return None
        self.writes += 1
        if isinstance(container, types.CellType):
            try:
                before: Any = container.cell_contents
            except ValueError:
                before = MISSING
        elif isinstance(container, dict):
            base = dict_base(container)
            before = base(base.items(container))
        elif isinstance(container, list):
            before = plain_items(container)
        elif isinstance(container, set):
            before = set(container)
        elif type(container) is deque:
            before = deque(container, container.maxlen)
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
                # Even if this is the value that was there: nobody has guarded that.
                record.assigned.add(key)
            dict_base(container).__setitem__(container, key, value)
        else:
            if record is not None:
                record.assigned.add(key if type(key) is int else MISSING)
            list.__setitem__(container, key, value)

    def delete_item(self, container: Any, key: Any) -> None:
        """``del container[key]`` on a list or dictionary."""
        record = self.touch(container)
        if isinstance(container, dict):
            if record is not None:
                record.written.add(key)
                record.assigned.add(key)
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

    def attribute_written(self, target: Any, name: str) -> bool:
        """Whether an attribute outside of any dictionary (of a class, or a slot) was written to in this trace."""
        if (id(target), name) not in self._attributes:
            return False
        self._check_unwritten()
        return True

    def set_attribute(self, target: Any, name: str, value: Any, source: Source) -> None:
        """Write (or, with :data:`MISSING`, delete) an attribute of a class, or a slot."""
        self._check_open(target)
        self.writes += 1
        key = (id(target), name)
        if key not in self._attributes:
            self._attributes[key] = AttributeRecord(target, name, source, own_attribute(target, name))
        put_attribute(target, name, value)

    def undo(self) -> None:
        """Put everything back as it was before the trace."""
        for written in reversed(self._attributes.values()):
            put_attribute(written.target, written.name, written.before)
        for record in reversed(self._records.values()):
            container, before = record.container, record.before
            if isinstance(container, types.CellType):
                if before is MISSING:
                    del container.cell_contents
                else:
                    container.cell_contents = before
            elif isinstance(container, dict):
                _restore_dictionary(container, before, record.written)
            elif record.append_only:
                list.__delitem__(container, slice(before, None))
            elif isinstance(container, list):
                list.__setitem__(container, slice(None), before)
            elif isinstance(container, deque):
                container.clear()
                container.extend(before)
            else:
                added, removed = _set_changes(container, before)
                set.difference_update(container, added)
                set.update(container, removed)

    def written_containers(self) -> list[tuple[Any, Source]]:
        """What was written to, with where it came from; for an object its dictionary or, for a slot, itself."""
        found = [(record.container, record.source) for record in self._records.values()]
        return found + [(written.target, written.source) for written in self._attributes.values()]

    def let_go(self) -> Iterator[Any]:
        """What was in a container or an attribute before, and is there no more; call before :meth:`undo`."""
        for record in self._records.values():
            container, before = record.container, record.before
            if record.append_only:
                continue
            if isinstance(container, types.CellType):
                old, new = [before], [] if not is_bound(container) else [container.cell_contents]
            elif isinstance(container, dict):
                base = dict_base(container)
                old = [value for key, value in before.items() if base.get(container, key, MISSING) is not value]
                new = list(base.values(container)) if old else []
            else:
                old, new = plain_items(before), plain_items(container)
            kept = {id(value) for value in new}
            yield from (value for value in old if id(value) not in kept)
        for written in self._attributes.values():
            if own_attribute(written.target, written.name) is not written.before:
                yield written.before

    def collect(self) -> tuple[Effect, ...]:
        """The final state of every container that ended up different; call before :meth:`undo`."""
        effects: list[Effect] = []
        for record in self._records.values():
            container, before = record.container, record.before
            if isinstance(container, types.CellType):
                effects.append(Effect(record.source, "cell", container.cell_contents))
            elif isinstance(container, dict):
                changed = {
                    key: value
                    for key, value in dict_base(container).items(container)
                    if key in record.assigned or key not in before or before[key] is not value
                }
                deleted = tuple(key for key in (*before, *record.assigned) if not dict.__contains__(container, key))
                if _is_reordered(container, before):
                    everything = {
                        key: item if key in changed else Unread(item, ItemSource(record.source, key))
                        for key, item in dict_base(container).items(container)
                    }
                    effects.append(Effect(record.source, "ordered dict", everything))
                elif changed or deleted:
                    effects.append(Effect(record.source, "dict", changed, deleted))
            elif record.append_only:
                effects.append(Effect(record.source, "append", plain_items(container)[before:]))
            elif isinstance(container, list):
                items = plain_items(container)
                changed_items = len(before) != len(items) or any(map(operator.is_not, before, items))
                if record.assigned or changed_items:
                    effects.append(Effect(record.source, "list", items))
            elif isinstance(container, deque):
                effects.append(Effect(record.source, "deque", list(container)))
            else:
                added, removed = _set_changes(container, before)
                if added or removed:
                    effects.append(Effect(record.source, "set", (removed, added)))
        for written in self._attributes.values():
            value = own_attribute(written.target, written.name)
            values = {} if value is MISSING else {written.name: value}
            effects.append(Effect(written.source, "attribute", values, () if values else (written.name,)))
        return tuple(effects)


def _set_changes(container: set[Any], before: set[Any]) -> tuple[list[Any], list[Any]]:
    """What was added to a set and what was removed from it. Put back item by item, the rest of a set keeps its order."""
    items = plain_items(container)
    old, new = {id(item) for item in before}, {id(item) for item in items}
    # Equal constants may be different objects.
    added = [item for item in items if id(item) not in old and (not is_leaf_value(item) or item not in before)]
    removed = [
        item
        for item in before
        if id(item) not in new and (not is_leaf_value(item) or not set.__contains__(container, item))
    ]
    return added, removed


def _is_reordered(container: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether writing what changed, key by key, would leave the keys in another order."""
    order = list(dict_base(container).keys(container))
    natural = [key for key in before if dict.__contains__(container, key)] + [key for key in order if key not in before]
    return any(one is not other and one != other for one, other in zip(natural, order, strict=True))


def _restore_dictionary(container: dict[Any, Any], before: dict[Any, Any], written: set[Any]) -> None:
    base = dict_base(container)
    # Key by key: the globals of a module are never empty for another thread, and few of many keys were written.
    for key in written:
        if key not in before:
            base.pop(container, key, None)
        elif not base.__contains__(container, key) or base.__getitem__(container, key) is not before[key]:
            base.__setitem__(container, key, before[key])
    if list(base.keys(container)) != list(before):
        base.clear(container)
        base.update(container, before)
