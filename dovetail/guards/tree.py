"""The sources of an entry's guards as a tree, and what is known of a value once its own guards have passed.

A check walks the tree from the roots: it reads a value, asks the guards of that value, and goes on to the steps below. So
wherever the check stands, the guards of all values on the way have passed, and what they ask for (a type, an object) may be
relied upon: this is what the methods of :class:`Tree` answer, and why a step may be written as a plain ``v[key]`` below a value
that is surely a ``dict``.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch

from dovetail.guards.guard import Guard
from dovetail.guards.predicate import Equals, Identity, Relation, TypeIs
from dovetail.guards.reading import class_dict, class_order, metaclasses, overrides_dict, returns_itself
from dovetail.guards.source import AttributeSource, InstanceDictSource, PinnedSource, Source

#: Types of class attributes that are given as they are when they are read on the class.
_PLAIN_TYPES = frozenset(
    {list, tuple, dict, set, frozenset, str, bytes, range, collections.OrderedDict, int, float, complex, bool}
    | {type(None), type(Ellipsis), type(NotImplemented)}
    | {torch.device, torch.dtype, torch.layout, torch.memory_format}
)


class Node:
    """One source of the tree, with its guards and the sources one step further."""

    __slots__ = ("children", "guards", "kept", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.guards: list[Guard] = []
        self.children: dict[Source, Node] = {}
        #: The local variable that keeps the value, where it is compared with the value of another node.
        self.kept: str | None = None

    def size(self) -> int:
        """The number of guards here and below."""
        return len(self.guards) + sum(child.size() for child in self.children.values())


#: Nodes, and whether their values are one object (else each is another one).
Group = tuple[tuple[Node, ...], bool]


class Tree:
    """The sources of some guards, by their roots."""

    def __init__(self, guards: Iterable[Guard]) -> None:
        self.roots: dict[Source, Node] = {}
        self.nodes: dict[Source, Node] = {}
        self.groups: list[Group] = []
        for guard in guards:
            node = self.node(guard.source)
            node.guards.append(guard)
            if isinstance(guard.predicate, Relation):
                group = (node, *map(self.node, guard.predicate.others))
                for position, one in enumerate(group):
                    one.kept = one.kept or f"kept{len(self.groups)}_{position}"
                self.groups.append((group, guard.predicate.is_same))

    def node(self, source: Source) -> Node:
        """The node for a source, made with all of its parents."""
        found = self.nodes.get(source)
        if found is None:
            found = self.nodes[source] = Node(source)
            parent = source.parent
            siblings = self.roots if parent is None else self.node(parent).children
            siblings[source] = found
        return found

    def _guards_of(self, source: Source) -> list[Guard]:
        node = self.nodes.get(source)
        return node.guards if node is not None else []

    def known_type(self, source: Source) -> type | None:
        """The type that a value is sure to have once its own guards have passed."""
        for guard in self._guards_of(source):
            if isinstance(guard.predicate, TypeIs):
                return guard.predicate.cls
        value = self.known_object(source)
        return None if value is None else type(value)

    def known_object(self, source: Source) -> Any:
        """The object that a source is sure to give once its guards have passed, or None."""
        if isinstance(source, PinnedSource):
            return source.pinned.value
        held = (guard.predicate.read() for guard in self._guards_of(source) if isinstance(guard.predicate, Identity))
        return next(held, None)

    def known_class(self, source: Source) -> type | None:
        """The same where it is a class."""
        value = self.known_object(source)
        return value if isinstance(value, type) else None

    def is_object_dict(self, source: Source) -> bool:
        """Whether a source is the plain ``__dict__`` of an object that is no class."""
        if not isinstance(source, InstanceDictSource) or self.known_type(source) not in (None, dict):
            return False
        kind = self.known_type(source.base)
        return kind is not None and not issubclass(kind, type)

    def class_of_table(self, source: Source) -> type | None:
        """The class whose own dictionary a source gives, if it is sure to."""
        if not isinstance(source, InstanceDictSource) and not (
            isinstance(source, AttributeSource) and source.attribute == "__dict__"
        ):
            return None
        owner = self.known_class(source.base)
        return owner if owner is not None and not overrides_dict(type(owner)) else None

    def holder(self, owner: type, source: AttributeSource) -> type | None:
        """The class in whose own dictionary an attribute of a class stands, where reading it comes to nothing else."""
        name = source.attribute
        if any(name in class_dict(kind) for kind in metaclasses(owner)):
            return None
        found = next((kind for kind in class_order(owner) if name in class_dict(kind)), None)
        return found if found is not None and self._accepts_only_plain(source, class_dict(found)[name]) else None

    def _accepts_only_plain(self, source: Source, own: Any) -> bool:
        """Whether the guards of a class attribute let only entries of the class's dictionary pass that reading the attribute gives
        unchanged; the entry now is one.
        """
        if not returns_itself(own) and type(own) not in _PLAIN_TYPES and type(own) is not type:
            return False
        return any(
            isinstance(guard.predicate, Equals)
            or (isinstance(guard.predicate, Identity) and guard.predicate.read() is own)
            or (isinstance(guard.predicate, TypeIs) and guard.predicate.cls in _PLAIN_TYPES)
            for guard in self._guards_of(source)
        )
