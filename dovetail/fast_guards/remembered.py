"""Remembers the values that a full check has found, and the counts of writes that vouch for them.

Most guards of a training step ask for values that change only when somebody writes to a dictionary: attributes, parameters and
submodules of the same modules, call after call. CPython counts the writes of each dictionary (3.11), or can tell somebody
of them (3.12 and later), and torch reads these counts in C++. So once a full check has passed, the values found in such
dictionaries are *remembered*, and later checks ask only whether one of the dictionaries was written to since. For 400 modules, 757
tensors and 2761 guards a check takes 110 us instead of 250 us: 50 for the tensors, 20 for the counts, 10 for the hooks.

Remembered values, and what vouches for each:

- an object reached from a remembered dictionary, tuple or object: the count of the dictionary that it was found in;
- the contents of an object's ``__dict__`` and of the dictionaries in it: their counts, the object's type and that its
  ``__dict__`` is still the same one;
- that a module has no hooks: its tables are remembered, and asked whether they are empty each time;
- functions, classes and constants in a dictionary of globals or in a class: the count of that dictionary.

Everything else is checked each time as before, starting from remembered objects where there are some: items of lists, closures,
the code of functions, other globals, the metadata of all tensors. If anything remembered has changed, the full check decides. An
object whose dictionary changes again and again is left out (:class:`Recorder`'s ``changing``).

The outermost remembered objects (the model) are held weakly; the objects below them are held until the next call sees that
the outermost one is another, or until the model itself goes.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail.guards.checker import Check
from dovetail.guards.container_predicate import HOOK_TABLES, ClassBody, DictKeys, HasNoKey, Length, NoHooks
from dovetail.guards.predicate import Equals, Identity, Predicate, TypeIs
from dovetail.guards.reading import (
    FETCH_ERRORS,
    class_dict,
    class_order,
    instance_dict,
    is_heap_type,
    is_mutable_type,
    metaclasses,
    read_item,
)
from dovetail.guards.source import AttributeSource, InstanceDictSource, ItemSource, PinnedSource
from dovetail.guards.tree import Node, Tree
from dovetail.torch_private import guard_managers as private_guard_managers

#: An object is remembered if at least so many guards hang below it.
_WORTH_IT = 6
#: Without such an object, at least so many guards on globals and classes must come down to counts.
_TABLES_WORTH_IT = 24
#: A dictionary that changed within so many seconds gets a strike; with ``_STRIKES`` of them, it is no longer remembered.
_SHORT_LIFE = 1.0
_STRIKES = 3


def has_plain_dict(kind: type) -> bool:
    """Whether :func:`instance_dict` of an instance is the dictionary that Python keeps for it, not a property."""
    if not is_mutable_type(kind) or issubclass(kind, torch.Tensor) or not kind.__dictoffset__:
        return False
    owner = next((owner for owner in class_order(kind) if "__dict__" in class_dict(owner)), None)
    return owner is not None and type(class_dict(owner)["__dict__"]) is types.GetSetDescriptorType


class Recorder:
    """Walks the tree of sources on the live objects of one call, and finds the values that later checks may rely on.

    ``values`` has the remembered value of a node, ``anchors`` the nodes where remembering starts, ``watched`` the nodes
    whose value is a dictionary with a count, ``tables`` those of globals and classes that the guards hold on to. A
    dictionary's count is read before its contents.
    """

    def __init__(self, changing: set[Node], tree: Tree) -> None:
        self.values: dict[Node, Any] = {}
        self.anchors: dict[Node, dict[str, Any]] = {}
        self.watched: dict[Node, dict[Any, Any]] = {}
        self.hooks: list[Any] = []
        self.hooked: set[Node] = set()
        self.tables: set[Node] = set()
        #: Weak references to the outermost remembered objects.
        self.outermost: dict[Node, weakref.ref[Any]] = {}
        self._changing = changing
        self._tree = tree
        self._owners: dict[int, Any] = {}
        self._typed: dict[int, Any] = {}
        self._tables: dict[int, tuple[dict[Any, Any], tuple[int, int]]] = {}

    def walk(self, node: Node, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look for nodes where remembering starts, at this one and below it."""
        if node not in self.values:
            self._anchor(node, callee, args, kwargs)
            if isinstance(node.source, PinnedSource) and node not in self._changing:
                self._table(node, node.source.pinned.value)
                if node in self.values:
                    self.tables.add(node)
        # Below a remembered value there may be a list of modules, where remembering starts anew.
        for child in node.children.values():
            self.walk(child, callee, args, kwargs)

    def is_worth_it(self) -> bool:
        """Whether enough is remembered for a check of its own."""
        return bool(self.anchors) or sum(node.size() for node in self.tables) >= _TABLES_WORTH_IT

    def finish(self) -> bool:
        """Make ``unchanged``, the check that nothing was written to since it was read; False if something was already."""
        owners = list(self._owners.values())
        typed = [value for key, value in self._typed.items() if key not in self._owners]
        own = {id(instance_dict(owner)) for owner in owners}
        tables = [table for key, (table, _) in self._tables.items() if key not in own]
        self.unchanged: Callable[[], bool] = private_guard_managers.unchanged_check(owners, typed, tables)
        return self.unchanged() and not self.changed()

    def hold_weakly(self, forget: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Let go of the outermost objects; ``forget`` is called when one of them goes."""

        def gone(_: Any) -> None:
            method = forget()
            if method is not None:
                method()

        self.outermost = {node: weakref.ref(self.values.pop(node), gone) for node in self.anchors}

    def changed(self) -> list[Node]:
        """The nodes whose dictionary was written to since it was read."""
        tables = [table for table, _ in self._tables.values()]
        now = dict(zip(self._tables, private_guard_managers.dictionary_versions(tables), strict=True))
        return [node for node, table in self.watched.items() if now[id(table)] != self._tables[id(table)][1]]

    def same_anchors(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the outermost objects are still found where they were, with the same dictionaries."""
        return all(
            node.source.fetch(callee, args, kwargs) is self.values[node] and instance_dict(self.values[node]) is table
            for node, table in self.anchors.items()
        )

    def implies(self, node: Node, predicate: Predicate) -> bool:
        """Whether a guard on a remembered value holds as long as nothing has changed."""
        if isinstance(predicate, (TypeIs, Identity, Equals)):
            return True
        if isinstance(predicate, NoHooks):
            return node in self.hooked
        if isinstance(predicate, ClassBody):
            return node in self.watched
        if isinstance(predicate, (Length, DictKeys, HasNoKey)):
            # move_to_end of an OrderedDict changes its order behind the count.
            return type(self.values[node]) is tuple or (
                node in self.watched and type(self.values[node]) in (dict, types.MappingProxyType)
            )
        return False

    def _anchor(self, node: Node, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        cls = next((guard.predicate.cls for guard in node.guards if isinstance(guard.predicate, TypeIs)), None)
        own = next((child for child in node.children.values() if isinstance(child.source, InstanceDictSource)), None)
        if cls is None or own is None or own in self._changing or node.size() < _WORTH_IT:
            return
        value = node.source.fetch(callee, args, kwargs)
        if type(value) is cls and has_plain_dict(cls) and cls.__weakrefoffset__:  # type: ignore[attr-defined]
            self.anchors[node] = instance_dict(value)
            self.values[node] = value
            self._below(node, value)

    def _table(self, node: Node, value: Any) -> None:
        """Remember the values in a dictionary of globals, or in a class, that the guards hold on to anyway."""
        if type(value) is dict:
            self._watch(node, value)
            self.values[node] = value
            for child in node.children.values():
                if isinstance(child.source, ItemSource) and _is_fixed(child):
                    self._entry(child, value[child.source.key])
        elif isinstance(value, type) and is_heap_type(value):
            own = next(iter(gc.get_referents(class_dict(value))))
            self._watch(node, own)
            self.values[node] = value
            for child in node.children.values():
                source = child.source
                if self._tree.class_of_table(source) is not None:
                    self._watch(child, own)
                    self.values[child] = class_dict(value)
                elif (
                    isinstance(source, AttributeSource)
                    and not metaclasses(value)  # they are not watched
                    and self._tree.holder(value, source) is value
                ):
                    found = own[source.attribute]
                    if _is_fixed(child):
                        self._entry(child, found)
                    elif type(found) is dict and child not in self._changing:
                        # The class is held on to anyway, and with it its tables, such as the fields of a dataclass.
                        self._remember(child, found)

    def _entry(self, node: Node, value: Any) -> None:
        self.values[node] = value
        if isinstance(value, type) and node not in self._changing:
            self._table(node, value)

    def _watch(self, node: Node, table: dict[Any, Any]) -> None:
        # Its count is read before its contents.
        if id(table) not in self._tables:
            self._tables[id(table)] = table, private_guard_managers.dictionary_versions([table])[0]
        self.watched[node] = table

    def _below(self, node: Node, value: Any) -> None:
        """Remember values one step from a remembered one and further."""
        for child in node.children.values():
            source = child.source
            if child in self._changing:
                continue
            if isinstance(source, InstanceDictSource) and has_plain_dict(type(value)):
                table = instance_dict(value)
                if node not in self.anchors:
                    self._owners[id(value)] = value
                self._remember(child, table)
                self._hooks(child, table)
            elif isinstance(source, ItemSource) and (node in self.watched or issubclass(type(value), tuple)):
                self._remember(child, read_item(value, source.key))

    def _remember(self, node: Node, value: Any) -> None:
        kind = type(value)
        if is_mutable_type(kind) and any(isinstance(guard.predicate, TypeIs) for guard in node.guards):
            self._typed[id(value)] = value
        if issubclass(kind, dict) and (node.guards or node.children):
            self._watch(node, value)
        self.values[node] = value
        self._below(node, value)

    def _hooks(self, node: Node, table: dict[str, Any]) -> None:
        if any(isinstance(guard.predicate, NoHooks) for guard in node.guards):
            found = [table.get(name) for name in HOOK_TABLES]
            if all(type(hooks) in (dict, OrderedDict) for hooks in found):
                self.hooks += found
                self.hooked.add(node)


def _is_fixed(node: Node) -> bool:
    """Whether a node's guards ask for one constant, function or class, which they hold on to."""
    return any(
        isinstance(guard.predicate, Equals)
        or (
            isinstance(guard.predicate, Identity)
            and not guard.predicate.is_weak
            and not isinstance(guard.predicate.read(), torch.Tensor)
        )
        for guard in node.guards
    )


class Remembering:
    """Decides which check an entry uses: the full one, or one that remembers the last hit.

    ``full(callee, args, kwargs)`` is the full check. ``generate(recorder, again)`` gives the fast one,
    which calls ``again(callee, args, kwargs)`` when a remembered value has changed. ``install(check)`` puts a
    check in use. The first hits are full checks: an entry that is used once should not pay for later ones.

    Threads may do this at the same time: every check that was ever installed stays right.
    """

    def __init__(
        self, full: Check, tree: Tree, generate: Callable[..., Check], install: Callable[[Check], None]
    ) -> None:
        self._full = full
        self._tree = tree
        self._generate = generate
        self._install = install
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        self._changing: set[Node] = set()
        self._strikes: Counter[Node] = Counter()
        #: Remembering costs as much as some hundred full checks; where it does not last, ever more of them come first.
        self._patience = 1
        self._hits = 0
        self._since = 0.0

    def first(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """Run the full check; after some hits in a row, remember the values that they found."""
        tensors = self._full(callee, args, kwargs)
        if tensors is None:
            return None
        self._hits += 1
        if self._hits > self._patience and self._lock.acquire(blocking=False):
            try:
                self._record(callee, args, kwargs)
            finally:
                self._lock.release()
        return tensors

    def _record(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        recorder = Recorder(self._changing, self._tree)
        # Another thread may be changing these values, or the sources go deeper than Python's stack.
        with contextlib.suppress(*FETCH_ERRORS):
            for root in self._tree.roots.values():
                recorder.walk(root, callee, args, kwargs)
            if not recorder.is_worth_it():
                self._install(self._full)
                return
            # If nothing was written between the reading of the counts and the end of a full check that passed, then the values
            # read in between are those that the full check saw.
            if (
                recorder.finish()
                and self._full(callee, args, kwargs) is not None
                and recorder.unchanged()
                and not recorder.changed()
                and recorder.same_anchors(callee, args, kwargs)
            ):
                recorder.hold_weakly(weakref.WeakMethod(self._gone))
                check = self._generate(recorder, self.again)
                self._recorder, self._since = recorder, time.monotonic()
                self._install(check)
                return
        self._forget_for(0.0)

    def again(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """Run the full check, after a remembered value has changed."""
        tensors = self._full(callee, args, kwargs)
        recorder = self._recorder
        if recorder is None:
            return tensors
        lived = time.monotonic() - self._since
        if recorder.unchanged():
            # Another model than the one remembered, which may come at each second call.
            self._forget_for(0.0)
        else:
            # Also where this entry does not fit any more: it may fit each second call.
            if lived < _SHORT_LIFE:
                self._strikes.update(recorder.changed())
                self._changing |= {node for node, strikes in self._strikes.items() if strikes >= _STRIKES}
            self._forget_for(lived)
        return tensors

    def _forget_for(self, lived: float) -> None:
        """Go back to full checks; how many, depends on how long remembering has lasted."""
        self._patience = 1 if lived >= _SHORT_LIFE else self._patience * 2
        self._forget()

    def _gone(self) -> None:
        """A remembered object is no more: it may be another one at each call."""
        # Also called when Python shuts down, and the names of modules are gone.
        self._patience *= 2
        self._forget()

    def _forget(self) -> None:
        self._recorder = None
        self._hits = 0
        self._install(self.first)
