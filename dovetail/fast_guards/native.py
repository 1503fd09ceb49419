"""Hands guards below fixed objects to torch's C++ guard managers: the codes and defaults of functions, tables of classes.

A program with many library functions in it has hundreds of such guards, which no count of a dictionary vouches for. In generated
Python they took 14 us of the 28 us of a check of BERT, and pushed other things out of the processor's caches
(benchmarks/bench_overhead.py, training, 4 cores, 2026-11).
"""

from __future__ import annotations

import collections
import contextlib
import enum
import gc
import types
from collections.abc import Callable, Container, Sequence
from typing import Any

from dovetail.fast_guards.remembered import has_plain_dict
from dovetail.guards.container_predicate import DictKeys, HasNoKey, Length
from dovetail.guards.guard import Guard
from dovetail.guards.predicate import SINGLETON_TYPES, Equals, Identity, Predicate, Relation, TypeIs
from dovetail.guards.reading import FETCH_ERRORS, class_dict, class_order, instance_dict, is_heap_type, metaclasses
from dovetail.guards.source import AttributeSource, CellSource, InstanceDictSource, ItemSource, Source
from dovetail.guards.tree import Group, Node, Tree
from dovetail.torch_private import guard_managers as private_guard_managers

_FUNCTION_SLOTS = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__closure__", "__name__"})
_BUILTIN_KEYS = frozenset({str, int, bytes, bool, type(None)})
_BUILTIN_CONSTANTS = frozenset({str, int, bytes})
_CONTAINERS = (dict, list, tuple)


class NativeWriter:
    """Decides which guards of a tree are asked in C++; nodes ``elsewhere``, and those below them, are left alone on the way
    down.
    """

    def __init__(self, tree: Tree, elsewhere: Container[Node]) -> None:
        self._tree = tree
        self._elsewhere = elsewhere
        self._guards = private_guard_managers.NativeGuards()
        self._done: set[int] = set()
        self._steps: dict[Node, private_guard_managers.NativeStep] = {}
        self._related: set[Node] = set()
        self._asked: set[Any] = set()
        #: The number of guards that were taken.
        self.count = 0

    def has(self, guard: Guard) -> bool:
        """Whether this guard was taken; it is the very object of the tree."""
        return id(guard) in self._done

    def is_complete(self, node: Node) -> bool:
        """Whether all guards of a node and below it were taken."""
        return (
            node in self._steps
            and (node.kept is None or node in self._related)
            and all(isinstance(guard.predicate, Relation) or self.has(guard) for guard in node.guards)
            and all(map(self.is_complete, node.children.values()))
        )

    def relate(self, groups: Sequence[Group]) -> list[Group]:
        """Take the guards that two values are one object, where both are reached here; returns the other groups."""
        rest = []
        for group, is_same in groups:
            if is_same and len(group) == 2 and all(node in self._steps for node in group):
                self._steps[group[0]].is_same_as(self._steps[group[1]])
                self.count += 1
            else:
                rest.append((group, is_same))
        left = {node for group, _ in rest for node in group}
        self._related = {node for group, _ in groups for node in group} - left
        return rest

    def is_related(self, node: Node) -> bool:
        """Whether nobody else has to compare the value of a node with that of another one."""
        return node in self._related

    def make_check(self) -> Callable[[], bool]:
        """The check of all guards that were taken."""
        return self._guards.make_check()

    def take(self, node: Node, fixed: Any, *, below: bool = False) -> None:
        """Take guards on a fixed object and below it, where C++ can ask them; ``below``: the node is one step from the object."""
        # A value that cannot be read now is left to the generated check, which misses.
        with contextlib.suppress(*FETCH_ERRORS):
            # The C++ guards read the table of a class, not the view of it that the class shows.
            (table,) = gc.get_referents(fixed) if type(fixed) is types.MappingProxyType else (fixed,)
            (self._below if below else self._take)(node, self._guards.at(table), fixed)

    def _take(self, node: Node, step: private_guard_managers.NativeStep, value: Any) -> None:
        guards = [guard for guard in node.guards if not isinstance(guard.predicate, Relation)]
        if any(isinstance(guard.predicate, Identity) and guard.predicate.is_weak for guard in guards):
            # The types on the way down are sure only after a guard that is asked elsewhere.
            return
        self._steps[node] = step
        for guard in sorted(guards, key=lambda guard: not isinstance(guard.predicate, (TypeIs, Identity))):
            if self._ask(node, guard.predicate, step):
                self._done.add(id(guard))
                self.count += 1
        for child in node.children.values():
            self._below(child, step, value)

    def _below(self, child: Node, step: private_guard_managers.NativeStep, value: Any) -> None:
        found = None if child in self._elsewhere else self._step(child, step, value)
        if found is not None:
            self._take(child, *found)

    # --- one step -----------------------------------------------------------------------------------------------------

    def _step(
        self, child: Node, step: private_guard_managers.NativeStep, value: Any
    ) -> tuple[private_guard_managers.NativeStep, Any] | None:
        source = child.source
        parent = source.parent
        assert parent is not None
        kind = type(value)
        if not self._is_sure(parent, kind):
            return None
        if isinstance(value, type) and self._tree.class_of_table(source) is value:
            if not is_heap_type(value):
                return None
            return step.class_dict(class_dict(value)), class_dict(value)
        if isinstance(source, InstanceDictSource):
            own = source.read(value)
            return (step.own_dict(own), own) if has_plain_dict(kind) else None
        if isinstance(source, CellSource) and kind is types.FunctionType:
            cell = value.__closure__[source.index]
            closure = step.attribute("__closure__", value.__closure__)
            content = cell.cell_contents
            return closure.item(tuple, source.index, cell).attribute("cell_contents", content), content
        if isinstance(source, ItemSource) and not source.held.is_object and type(source.key) in _BUILTIN_KEYS:
            container = next((builtin for builtin in _CONTAINERS if issubclass(kind, builtin)), None)
            if kind is types.MappingProxyType and self._tree.class_of_table(parent) is not None:
                container = dict
            if container is None or (container is not dict and type(source.key) is not int):
                return None
            if container is not dict and source.key < 0:
                return None
            item = source.read(value)
            return step.item(container, source.key, item), item
        if isinstance(source, AttributeSource):
            return self._attribute(source, step, value)
        return None

    def _attribute(
        self, source: AttributeSource, step: private_guard_managers.NativeStep, value: Any
    ) -> tuple[private_guard_managers.NativeStep, Any] | None:
        name, kind = source.attribute, type(value)
        if kind is types.FunctionType and name in _FUNCTION_SLOTS:
            found = source.read(value)
            return step.attribute(name, found), found
        if isinstance(value, type):
            if name == "__mro__":
                order = class_order(value)
                return step.class_order(order), order
            holder = self._tree.holder(value, source) or self._holder_of_member(value, source)
            order = class_order(value)
            # Since Python 3.12 a static type's dictionary is not where the C++ guards look for it.
            if holder is None or not all(map(is_heap_type, order[: order.index(holder) + 1])):
                return None
            self._reads_as_own(value, order[: order.index(holder)], name)
            found = class_dict(holder)[name]
            table = self._guards.at(holder).class_dict(class_dict(holder))
            return table.item(dict, name, found), found
        if kind is types.ModuleType and name in instance_dict(value):
            table = instance_dict(value)
            step.has_type(kind)
            return step.own_dict(table).item(dict, name, table[name]), table[name]
        slot = class_dict(kind).get(name)
        if type(slot) is not types.MemberDescriptorType or not is_heap_type(kind):
            return None
        if ("slot", kind, name) not in self._asked:
            self._asked.add(("slot", kind, name))
            table = self._guards.at(kind).class_dict(class_dict(kind))
            table.item(dict, name, slot).is_object(slot)
        found = slot.__get__(value)
        return step.attribute(name, found), found

    def _reads_as_own(self, owner: type, nearer: Sequence[type], name: str) -> None:
        """Ask that nothing comes before an attribute of a class: in no metaclass, and in no base that is nearer than its own."""
        above = [kind for kind in metaclasses(owner) if is_heap_type(kind)]
        if above:
            self._guards.at(owner).has_type(type(owner))
        self._lacks(owner, nearer, name)
        self._lacks(type(owner), above, name)

    def _lacks(self, owner: type, kinds: Sequence[type], name: str) -> None:
        """Ask that a class has the same bases as now, and that none of these has the name in its dictionary."""
        if kinds and ("lacks", owner, name) not in self._asked:
            self._asked.add(("lacks", owner, name))
            self._guards.at(owner).class_order(class_order(owner)).is_object(class_order(owner))
            for kind in kinds:
                self._guards.at(kind).class_dict(class_dict(kind)).lacks(name)

    def _holder_of_member(self, owner: type, source: AttributeSource) -> type | None:
        """The class in whose dictionary a member of an enumeration stands. That its class has no ``__get__``, which would be called
        at each reading, is asked with the rest.
        """
        name, order = source.attribute, class_order(owner)
        holder = next((kind for kind in order if name in class_dict(kind)), None)
        if holder is None or any(name in class_dict(kind) for kind in metaclasses(owner)):
            return None
        own = class_dict(holder)[name]
        kinds = class_order(type(own))
        predicates = [guard.predicate for guard in self._tree.nodes[source].guards]
        is_held = any(isinstance(item, Equals) and item.value is own for item in predicates)
        if not is_held or not issubclass(type(own), enum.Enum) or any("__get__" in class_dict(kind) for kind in kinds):
            return None
        self._guards.at(own).has_type(type(own))
        self._lacks(type(own), [kind for kind in kinds if is_heap_type(kind)], "__get__")
        return holder

    def _is_sure(self, source: Source, kind: type) -> bool:
        """Whether a value is of the type that it has now whenever its own guards hold, which are asked first."""
        if isinstance(source, AttributeSource) and source.attribute in ("__defaults__", "__closure__"):
            # Without a guard on its type: to read from None is an error there, and a miss.
            return True
        if self._tree.class_of_table(source) is not None:
            return True
        if isinstance(source, InstanceDictSource):
            return kind is dict
        return self._tree.known_type(source) is kind

    # --- one guard ----------------------------------------------------------------------------------------------------

    def _ask(self, node: Node, predicate: Predicate, step: private_guard_managers.NativeStep) -> bool:
        """Take one guard; False if C++ cannot ask it."""
        known = self._tree.known_type(node.source)
        if isinstance(node.source, InstanceDictSource) or self._tree.class_of_table(node.source) is not None:
            known = dict
        match predicate:
            case TypeIs():
                step.has_type(predicate.cls)
            case Identity(is_weak=False):
                step.is_object(predicate.read())
            case Equals() if type(predicate.value) in SINGLETON_TYPES or issubclass(type(predicate.value), enum.Enum):
                step.is_object(predicate.value)
            case Equals() if type(predicate.value) in _BUILTIN_CONSTANTS:
                step.equals(predicate.value)
            case Length() if known in (*_CONTAINERS, collections.OrderedDict):
                step.has_length(predicate.length, known is not list and known is not tuple)
            case DictKeys(keys=keys) if not keys and known is dict:
                step.has_length(0, True)
            case HasNoKey() if known is dict and not predicate.held.is_object and type(predicate.key) in _BUILTIN_KEYS:
                step.lacks(predicate.key)
            case _:
                return False
        return True
