"""Objects that a captured function takes for different ones stay different ones.

Two names for one object are guarded where the second is read. The other way round matters where a function writes to objects, or
compares them by identity: what is written through one name would be seen through the other if both led to one object later.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from dovetail.guards import Distinct, InstanceDictSource

if TYPE_CHECKING:
    from dovetail.frontend.effects import Effects
    from dovetail.frontend.values import Values


def guard_distinct(values: Values, effects: Effects) -> None:
    """Guard that what was written to is none of the other objects of its type that were met."""
    kinds: dict[type, bool] = {}
    for container, source in effects.written_containers():
        if isinstance(container, types.CellType):
            continue
        owner = source.base if isinstance(source, InstanceDictSource) else None
        kinds[values.type_at(owner) if owner is not None else type(container)] = owner is not None
    for kind in kinds:
        members = [
            source
            for value, source in values.noted()
            if type(value) is kind and not isinstance(source, InstanceDictSource)
        ]
        if len(members) > 1:
            values.guard(members[0], Distinct(tuple(members[1:])), "objects of one type, of which one is written to")


def guard_comparison(values: Values, left: Any, right: Any) -> None:
    """``left is right`` was asked, and they are not."""
    one, other = values.source_of(left), values.source_of(right)
    if one is not None and other is not None and type(left) is type(right):
        values.guard(one, Distinct((other,)), f"{one.name} is compared with {other.name}")
