"""Classes stay as they were when a program was captured: what they define, what they inherit, and that they define no more.

Python looks special methods up on the class (``__len__``, ``__bool__``, ``__getattr__`` ...), most of the time to find none. To
guard each look-up would be to guard absence in hundreds of places. A class changes so seldom that one guard says it all: the same
names, and the same functions, properties and other descriptors under them. Plain data in a class is guarded where it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.frontend.values.leaves import is_trusted
from dovetail.guards import AttributeSource, ClassBody, GuardSet, Identity, PinnedSource, TypeIs
from dovetail.guards.guard import root_of
from dovetail.guards.reading import class_dict, class_order, is_heap_type

if TYPE_CHECKING:
    from dovetail.frontend.values.values import Values


def guard_classes(values: Values, guards: GuardSet) -> None:
    """Guard the classes that a capture has met, with all that they inherit from, as they are now."""
    for kind in _met(guards):
        order = class_order(kind)
        open_classes = [owner for owner in order if not _is_fixed(values, owner)]
        if open_classes and len(order) > 2:
            source = AttributeSource(values.pin(kind, kind.__qualname__), "__mro__")
            guards.add(source, Identity(order), None, f"what {kind.__qualname__} inherits was asked")
        for owner in open_classes:
            source = AttributeSource(values.pin(owner, owner.__qualname__), "__dict__")
            guards.add(source, ClassBody.of(class_dict(owner)), None, f"methods are looked up on {owner.__qualname__}")


def _met(guards: GuardSet) -> list[type]:
    """The classes that guards speak of, and their metaclasses."""
    found: dict[type, None] = {}
    for guard in guards.so_far():
        root = root_of(guard.source)
        for kind in (
            guard.predicate.cls if isinstance(guard.predicate, TypeIs) else None,
            guard.predicate.read() if isinstance(guard.predicate, Identity) else None,
            root.pinned.value if isinstance(root, PinnedSource) else None,
        ):
            if isinstance(kind, type):
                found[kind] = None
                found[type(kind)] = None
    return list(found)


def _is_fixed(values: Values, kind: type) -> bool:
    if kind.__module__.startswith(("torch.nn.modules.", "torch.optim.")) and kind is not torch.nn.Module:
        # Part of the program like the user's own modules, and patched like them. Module itself is patched by torch.compile.
        return False
    return not is_heap_type(kind) or is_trusted(kind.__module__)
