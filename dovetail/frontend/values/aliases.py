"""Objects that a captured function takes for different ones stay different ones.

Two names for one object are guarded where the second is read. The other way round matters where a function writes to objects, or
compares them by identity: what is written through one name would be seen through the other if both led to one object later. A
plain object is compared by identity wherever ``==`` or a hash is asked for too: as a key, in a search, in a comparison of
containers.
"""

from __future__ import annotations

import types
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from dovetail.frontend.interpreter.lookup import class_attribute, instance_dict
from dovetail.frontend.rules import comparison_rule
from dovetail.frontend.values.leaves import IDENTITY_TYPES, LEAF_TYPES, is_leaf_value
from dovetail.guards import AttributeSource, Distinct, Identity, InstanceDictSource

if TYPE_CHECKING:
    from dovetail.frontend.effects.journal import EffectJournal
    from dovetail.frontend.values.values import Values


def guard_distinct(values: Values, effects: EffectJournal) -> None:
    """Guard that what was written to, or compared by identity, is none of the other objects of its type that were met."""
    kinds = dict.fromkeys(values.compared_kinds, "compared with others")
    for container, source in effects.written_containers():
        if isinstance(container, type) or (isinstance(container, types.CellType) and not values.by_code):
            continue
        owner = source.base if isinstance(source, InstanceDictSource) else None
        kinds[values.type_at(owner) if owner is not None else type(container)] = "written to"
    known = values.noted()
    for kind, what in kinds.items():
        of_kind = (source for value, source in known if type(value) is kind)
        members = [*dict.fromkeys(source for source in of_kind if not isinstance(source, InstanceDictSource))]
        if len(members) > 1:
            values.guard(members[0], Distinct(tuple(members[1:])), f"objects of one type, of which one is {what}")


def guard_comparison(values: Values, left: Any, right: Any) -> None:
    """``left is right`` was asked, and they are not."""
    one, other = (
        values.source_of(item) if (stood := values.stood_for(item)) is None else stood.source for item in (left, right)
    )
    if one is not None and other is not None and type(left) is type(right):
        values.guard(one, Distinct((other,)), f"{one.name} is compared with {other.name}")


def guard_equality(values: Values, value: Any) -> None:
    """Native code compares a value with others by ``==``: guard what the answer can depend on."""
    _guard_content(values, value, False, set())


def guard_key(values: Values, key: Any, is_old: bool = False) -> None:
    """Native code hashes a key: guard what the outcome of a look-up can depend on.

    ``is_old``: what is looked up was stored before the capture, for this very key, so that it must be this very object.
    """
    if type(key) not in LEAF_TYPES:
        _guard_content(values, key, is_old, set())


def _guard_content(values: Values, value: Any, is_old_key: bool, seen: set[int]) -> None:
    values.hold(value)
    if is_leaf_value(value) or id(value) in seen or isinstance(value, (torch.Tensor, *IDENTITY_TYPES)):
        return
    seen.add(id(value))
    kind = type(value)
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        values.whole(value)
        for item in dict.values(value) if isinstance(value, dict) else value:
            _guard_content(values, item, is_old_key, seen)
        return
    source = values.source_of(value)
    by_identity = class_attribute(kind, "__eq__")[1] is object
    if by_identity and source is not None:
        values.compared_kinds.add(kind)
    if source is not None and (is_old_key or not by_identity):
        values.guard(source, Identity(value), f"{source.name} is a key, or compared by its own __eq__")
    if by_identity:
        return
    for rule in comparison_rule:
        rule(value)
    attributes = instance_dict(value)
    if attributes is not None:
        if source is not None:
            values.note(attributes, InstanceDictSource(source))
        values.whole(attributes)
        for item in attributes.values():
            _guard_content(values, item, is_old_key, seen)
    for owner in kind.__mro__:
        for name, slot in owner.__dict__.items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                held = slot.__get__(value, kind)
                if source is not None:
                    held = values.read(held, AttributeSource(source, name))
                _guard_content(values, held, is_old_key, seen)
