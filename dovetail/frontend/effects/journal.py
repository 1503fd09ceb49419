"""Writes to Python objects that existed before the capture: made for real, journalled, undone, replayed by the entry.

A container (a list, a dictionary, an object's ``__dict__``, a set, a closure cell) is copied before its first write. When the
program has ended, :meth:`EffectJournal.collect` says what the final state is, and :meth:`EffectJournal.undo` puts everything back.
"""

from __future__ import annotations

import operator
import types
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.frontend.code.frame import Break, Unread
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import ItemSource, Source
from dovetail.guards.reading import plain_items
from dovetail.runtime.effects import dict_class

MISSING = object()


@dataclass(frozen=True)
class Effect:
    """The final state of one container: replaced contents of a list, set or cell, changed items of a dictionary (all of them
    where their order changed), the items appended to a list, attributes, or a call that follows the graph.
    """

    source: Source
    kind: Literal["append", "attribute", "call", "cell", "deque", "dict", "list", "ordered dict", "set"]
    values: Any
    deleted: tuple[Any, ...] = ()


class Written:
    """A container that was written to, with its state before."""

    def __init__(self, container: Any, source: Source, before: Any) -> None:
        self.container = container
        self.source = source
        self.before = before

    def assigned(self, key: Any) -> None:
        """A key or place was set or deleted, without a guard on what was there: at another call that may be something else."""

    def has_written(self, key: Any) -> bool:
        """Whether the item under a key is the program's own."""
        return True

    @abstractmethod
    def undo(self) -> None:
        """Put the container back as it was."""

    @abstractmethod
    def effect(self) -> Effect | None:
        """The final state; None where it is that of before."""

    def let_go(self) -> Iterator[Any]:
        """The values that were in the container before and are there no more."""
        kept = {id(value) for value in plain_items(self.container)}
        yield from (value for value in plain_items(self.before) if id(value) not in kept)


class WrittenCell(Written):
    """A closure cell."""

    def undo(self) -> None:
        if self.before is MISSING:
            del self.container.cell_contents
        else:
            self.container.cell_contents = self.before

    def effect(self) -> Effect:
        return Effect(self.source, "cell", self.container.cell_contents)

    def let_go(self) -> Iterator[Any]:
        if not is_bound(self.container) or self.container.cell_contents is not self.before:
            yield self.before


class WrittenDict(Written):
    """A dictionary; ``written`` are the keys that native code or the program may have written, ``set`` those surely written."""

    def __init__(self, container: dict[Any, Any], source: Source) -> None:
        self.base = dict_class(container)
        super().__init__(container, source, self.base(self.base.items(container)))
        self.written: set[Any] = set()
        self._set: set[Any] = set()

    def assigned(self, key: Any) -> None:
        self.written.add(key)
        self._set.add(key)

    def has_written(self, key: Any) -> bool:
        return key in self.written

    def undo(self) -> None:
        # Key by key: the globals of a module are never empty for another thread, and few of many keys were written.
        container, before, base = self.container, self.before, self.base
        for key in self.written:
            if key not in before:
                base.pop(container, key, None)
            elif not base.__contains__(container, key) or base.__getitem__(container, key) is not before[key]:
                base.__setitem__(container, key, before[key])
        if list(base.keys(container)) != list(before):
            base.clear(container)
            base.update(container, before)

    def effect(self) -> Effect | None:
        items, before = self.base.items(self.container), self.before
        changed = {key: item for key, item in items if key in self._set or key not in before or before[key] is not item}
        if self._is_reordered():
            everything = {
                key: item if key in changed else Unread(item, ItemSource(self.source, key)) for key, item in items
            }
            return Effect(self.source, "ordered dict", everything)
        deleted = tuple(key for key in (*before, *self._set) if not dict.__contains__(self.container, key))
        return Effect(self.source, "dict", changed, deleted) if changed or deleted else None

    def _is_reordered(self) -> bool:
        """Whether writing the changes, key by key, would leave the keys in another order."""
        order = list(self.base.keys(self.container))
        natural = [key for key in self.before if dict.__contains__(self.container, key)]
        natural += [key for key in order if key not in self.before]
        return any(one is not other and one != other for one, other in zip(natural, order, strict=True))

    def let_go(self) -> Iterator[Any]:
        get = self.base.get
        old = [value for key, value in self.before.items() if get(self.container, key, MISSING) is not value]
        kept = {id(value) for value in self.base.values(self.container)} if old else set()
        yield from (value for value in old if id(value) not in kept)


class WrittenSequence(Written):
    """A list or a deque. One that was only appended to is not read, until somebody asks for more."""

    def __init__(self, container: Any, source: Source, is_appended: bool = False) -> None:
        super().__init__(container, source, plain_items(container))
        self.is_appended = is_appended
        self.appended: list[Any] = []
        self._is_set = False

    def assigned(self, key: Any) -> None:
        self._is_set = True

    def undo(self) -> None:
        if isinstance(self.container, list):
            list.__setitem__(self.container, slice(None), self.before)
        else:
            self.container.clear()
            self.container.extend(self.before)

    def effect(self) -> Effect | None:
        if self.is_appended:
            return Effect(self.source, "append", self.appended)
        items = plain_items(self.container)
        is_changed = len(self.before) != len(items) or any(map(operator.is_not, self.before, items))
        kind: Any = "list" if isinstance(self.container, list) else "deque"
        return Effect(self.source, kind, items) if self._is_set or is_changed else None


class WrittenSet(Written):
    """A set. It is put back item by item, so that the others keep their order."""

    def undo(self) -> None:
        removed, added = self._changes()
        set.difference_update(self.container, added)
        set.update(self.container, removed)

    def effect(self) -> Effect | None:
        changes = self._changes()
        return Effect(self.source, "set", changes) if any(changes) else None

    def _changes(self) -> tuple[list[Any], list[Any]]:
        before, items = self.before, plain_items(self.container)
        old, new = {id(item) for item in before}, {id(item) for item in items}
        # Equal constants may be different objects.
        added = [item for item in items if id(item) not in old and (not is_leaf_value(item) or item not in before)]
        removed = [
            item
            for item in before
            if id(item) not in new and (not is_leaf_value(item) or not set.__contains__(self.container, item))
        ]
        return removed, added


class WrittenAttribute(Written):
    """An attribute outside of any dictionary: a slot, a member of an exception, data in a class."""

    def __init__(self, target: Any, name: str, source: Source) -> None:
        super().__init__(target, source, own_attribute(target, name))
        self.name = name

    def undo(self) -> None:
        put_attribute(self.container, self.name, self.before)

    def effect(self) -> Effect:
        value = own_attribute(self.container, self.name)
        values = {} if value is MISSING else {self.name: value}
        return Effect(self.source, "attribute", values, () if values else (self.name,))

    def let_go(self) -> Iterator[Any]:
        if own_attribute(self.container, self.name) is not self.before:
            yield self.before


class EffectJournal:
    """The writes of one capture, in order. ``read_items`` guards the items that a list had before."""

    def __init__(
        self, source_of: Callable[[Any], Source | None], read_items: Callable[[list[Any], Source, list[Any]], None]
    ) -> None:
        self._source_of = source_of
        self._read_items = read_items
        self._written: dict[int, Written] = {}
        self._attributes: dict[tuple[int, str], WrittenAttribute] = {}
        self._late: list[Callable[[], list[Effect]]] = []
        self._is_result: Callable[[Any], bool] | None = None
        #: Writes to what existed before the capture; steps of iterators, and calls back from native code.
        self.writes = self.moves = 0
        #: Inputs that require a gradient from the start of the graph on.
        self.inputs_made_differentiable: list[int] = []
        #: Inputs whose ``.grad`` is dropped before the graph computes anything, each with the input that the gradient is.
        self.gradients_dropped_first: list[tuple[int, int]] = []

    def forget(self) -> None:
        """Let go of all containers; the capture is over."""
        for table in (self._written, self._attributes, self._late):
            table.clear()

    # --- reading ------------------------------------------------------------------------------------------------------

    def written(self, container: Any, key: Any = MISSING) -> bool:
        """Whether a container (or one key of a dictionary) was written to."""
        found = self._find(container)
        return found is not None and (key is MISSING or found.has_written(key))

    def only_appended(self, container: Any) -> int:
        """The number of items that were appended to a list or deque, if it was not written to otherwise; else 0."""
        found = self._written.get(id(container))
        return len(found.appended) if isinstance(found, WrittenSequence) and found.is_appended else 0

    def before(self, container: Any) -> Any:
        """A container as it was before the capture."""
        found = self._find(container)
        return container if found is None else found.before

    def attribute_written(self, target: Any, name: str) -> bool:
        """Whether an attribute outside of any dictionary was written to."""
        if (id(target), name) not in self._attributes:
            return False
        self._check_unwritten()
        return True

    def _find(self, container: Any) -> Written | None:
        found = self._written.get(id(container))
        if found is not None:
            self._check_unwritten()
            self._settle(found)
        return found

    def _settle(self, found: Written) -> None:
        """Read a list or deque that was only appended to: somebody asks about it."""
        if isinstance(found, WrittenSequence) and found.is_appended:
            found.is_appended = False
            self._read_items(found.container, found.source, found.before)

    # --- writing ------------------------------------------------------------------------------------------------------

    def append(self, container: Any, value: Any) -> None:
        """``container.append(value)`` on a list or deque, without reading it: a history may grow from call to call."""
        self._check_open(container)
        if (source := self._source_of(container)) is not None:
            self.writes += 1
            found = self._written.get(id(container)) or WrittenSequence(container, source, is_appended=True)
            self._written[id(container)] = found
            if isinstance(found, WrittenSequence):
                found.appended.append(value)
        type(container).append(container, value)

    def touch(self, container: Any) -> Written | None:
        """Copy a container before its first write; None for one that the program has made, which needs no journal."""
        self._check_open(container)
        found = self._written.get(id(container))
        if found is not None:
            self._settle(found)
        else:
            if (source := self._source_of(container)) is None:
                return None
            found = self._written[id(container)] = _copied(container, source)
        self.writes += 1
        return found

    def set_item(self, container: Any, key: Any, value: Any) -> None:
        """``container[key] = value`` on a list or dictionary, without the class's own ``__setitem__``."""
        record = self.touch(container)
        if record is not None:
            # Even if this is the value that was there: nobody has guarded that.
            record.assigned(key)
        _base(container).__setitem__(container, key, value)

    def delete_item(self, container: Any, key: Any) -> None:
        """``del container[key]`` on a list or dictionary."""
        record = self.touch(container)
        if isinstance(record, WrittenDict):
            record.assigned(key)
        _base(container).__delitem__(container, key)

    def touch_all(self, container: Any) -> None:
        """Before a native method that may write any part of the container."""
        record = self.touch(container)
        if isinstance(record, WrittenDict):
            record.written.update(container)

    def set_cell(self, cell: types.CellType, value: Any) -> None:
        """Write a closure cell."""
        self.touch(cell)
        cell.cell_contents = value

    def set_attribute(self, target: Any, name: str, value: Any, source: Source) -> None:
        """Write (or, with :data:`MISSING`, delete) an attribute outside of any dictionary."""
        self._check_open(target)
        self.writes += 1
        key = (id(target), name)
        if key not in self._attributes:
            self._attributes[key] = WrittenAttribute(target, name, source)
        put_attribute(target, name, value)

    def defer(self, effects: Callable[[], list[Effect]]) -> None:
        """Have effects follow all others; ``effects`` is asked when the program has ended."""
        self.writes += 1
        self._late.append(effects)

    # --- the end ------------------------------------------------------------------------------------------------------

    def collect(self) -> tuple[Effect, ...]:
        """The final state of everything that ended up different; call before :meth:`undo`."""
        effects = [record.effect() for record in self._all()]
        return tuple(effect for effect in effects if effect is not None)

    def late(self) -> list[Effect]:
        """The effects that follow all others."""
        return [effect for effects in self._late for effect in effects()]

    def written_containers(self) -> list[tuple[Any, Source]]:
        """Everything written to, with where it came from; for an object its dictionary or, for a slot, itself."""
        return [(record.container, record.source) for record in self._all()]

    def let_go(self) -> Iterator[Any]:
        """The values that were in a container or an attribute before, and are there no more; call before :meth:`undo`."""
        for record in self._all():
            yield from record.let_go()

    def undo(self) -> None:
        """Put everything back as it was before the capture."""
        for record in reversed(self._attributes.values()):
            record.undo()
        for written in reversed(self._written.values()):
            written.undo()

    def close(self, is_result: Callable[[Any], bool]) -> None:
        """The forward has ended and is undone. Hooks and custom backwards must keep to themselves from now on."""
        self._is_result = is_result

    def _all(self) -> list[Written]:
        return [*self._written.values(), *self._attributes.values()]

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


def _copied(container: Any, source: Source) -> Written:
    if isinstance(container, types.CellType):
        return WrittenCell(container, source, container.cell_contents if is_bound(container) else MISSING)
    if isinstance(container, dict):
        return WrittenDict(container, source)
    if isinstance(container, list) or type(container) is deque:
        return WrittenSequence(container, source)
    if isinstance(container, set):
        return WrittenSet(container, source, set(container))
    raise Break(f"a {type(container).__name__} that existed before the call is written to")


def _base(container: Any) -> Any:
    return dict_class(container) if isinstance(container, dict) else list


def own_attribute(target: Any, name: str) -> Any:
    """The content of a slot, a member of an exception, or data in a class; :data:`MISSING` where there is nothing."""
    try:
        return (type if isinstance(target, type) else object).__getattribute__(target, name)
    except AttributeError:
        return MISSING


def put_attribute(target: Any, name: str, value: Any) -> None:
    """Set an attribute past the class's own ``__setattr__``; with :data:`MISSING`, delete it."""
    if value is not MISSING:
        (type if isinstance(target, type) else object).__setattr__(target, name, value)
    elif own_attribute(target, name) is not MISSING:
        object.__delattr__(target, name)
