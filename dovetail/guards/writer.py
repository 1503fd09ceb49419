"""The writer of a generated check: lines, the objects that it names, and reads of attributes that stand in classes."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from dovetail.guards.reading import class_dict, class_order, metaclasses

if TYPE_CHECKING:
    from dovetail.guards.source import AttributeSource
    from dovetail.guards.tree import Tree


class Writer:
    """Lines of a check that is being written; sources and predicates ask it for the names of objects and for what ``tree``
    knows.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.lines: list[str] = []
        #: The objects that the check refers to, by the name under which it does.
        self.names: dict[str, Any] = {}
        self._constants: dict[int, tuple[str, Any]] = {}
        self._class_tables: dict[type, Any] = {}
        self._checked: set[tuple[type, str]] = set()

    def constant(self, value: Any, hint: str = "c") -> str:
        """The name under which the check sees an object."""
        known = self._constants.get(id(value))
        if known is None:
            name = f"{hint}{len(self._constants)}"
            known = self._constants[id(value)] = (name, value)
            self.names[name] = value
        return known[0]

    def literal(self, value: Any) -> str:
        """A string, whole number, truth value or None as it is, everything else by name."""
        if value is None or type(value) in (str, int, bool):
            return repr(value)
        return self.constant(value)

    def require(self, condition: str) -> None:
        """Miss unless the condition is true."""
        self.lines.append(f"        if not ({condition}): return None")

    def class_table(self, owner: type) -> str:
        """The name of a live view on a class's own dictionary."""
        return self.constant(self._class_tables.setdefault(owner, class_dict(owner)), "class_")

    def class_attribute(self, source: AttributeSource, base: str) -> str | None:
        """The expression for an attribute that stands in a class's own dictionary: one of the class, or a slot of an instance.

        ``read_attribute`` takes 1 us for either. The name is in no metaclass, so that nothing comes before the class's own
        dictionary; and the guards of the attribute itself are to refuse a value that would be bound or run code.
        """
        owner = self.tree.known_class(source.base)
        if owner is not None:
            holder = self.tree.holder(owner, source)
            return None if holder is None else self._inherited(owner, holder, source.attribute)
        kind = self.tree.known_type(source.base)
        slot = class_dict(kind).get(source.attribute) if kind is not None else None
        if kind is None or type(slot) is not types.MemberDescriptorType:
            return None
        if (kind, source.attribute) not in self._checked:
            self._checked.add((kind, source.attribute))
            self.require(f"{self.class_table(kind)}[{source.attribute!r}] is {self.constant(slot, 'slot_')}")
        return f"{self.constant(slot.__get__, 'read_slot_')}({base})"

    def _inherited(self, owner: type, holder: type, name: str) -> str:
        """The expression for an attribute of a class that stands in its dictionary, or that of one of its bases."""
        order, above = class_order(owner), metaclasses(owner)
        if above:
            self.require(f"type({self.constant(owner, 'class_')}) is {self.constant(type(owner), 'class_')}")
        for one, first in (owner, order[: order.index(holder)]), (type(owner), above):
            if first and (one, name) not in self._checked:
                self._checked.add((one, name))
                read, constant = self.constant(class_order, "read_order_"), self.constant(class_order(one), "order_")
                self.require(f"{read}({self.constant(one, 'class_')}) is {constant}")
                for kind in first:
                    self.require(f"{name!r} not in {self.class_table(kind)}")
        return f"{self.class_table(holder)}[{name!r}]"
