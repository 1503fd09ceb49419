"""Entries that end themselves: a call's own effects invalidate its guards.

The first step of an optimizer finds no state and creates it; a counter that was 0 becomes 1. At the next call another entry is
needed, so that this one is probably never used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.guards import Equals, GradSource, Guard, HasNoKey, InstanceDictSource, ItemSource, Source
from dovetail.guards.reading import item_key
from dovetail.runtime.effects import EffectRecipe
from dovetail.runtime.recipe import ConstantItem, ObjectItem, Recipe, TensorItem

_DICTIONARIES = ("dict", "ordered dict")


def ended_assumption(guards: Sequence[Guard], effects: Sequence[EffectRecipe]) -> Guard | None:
    """The first guard that no longer holds once the effects have been made; None where none is found.

    It looks at items of dictionaries, attributes and gradients. This is no proof: whoever asks must be right either way.
    """
    added: dict[Source, list[Recipe]] = {}
    constants: dict[Source, Any] = {}
    gradients = set()
    for effect in effects:
        if not isinstance(effect.values, ObjectItem):
            continue
        for key, value in effect.values.pairs:
            if effect.kind in _DICTIONARIES:
                added.setdefault(effect.source, []).append(key)
            if not isinstance(key, ConstantItem):
                continue
            holder = effect.source if effect.kind in _DICTIONARIES else InstanceDictSource(effect.source)
            if isinstance(value, ConstantItem):
                constants[ItemSource(holder, key.value)] = value.value
            elif key.value == "grad" and isinstance(value, TensorItem):
                gradients.add(effect.source)
    for guard in guards:
        source, predicate = guard.source, guard.predicate
        if isinstance(predicate, HasNoKey):
            if any(_may_be(key, predicate.key) for key in added.get(source, ())):
                return guard
        elif isinstance(predicate, Equals):
            if source in constants and not predicate.holds(constants[source]):
                return guard
            if isinstance(source, GradSource) and predicate.value is None and source.base in gradients:
                return guard
    return None


def _may_be(recipe: Recipe, key: Any) -> bool:
    """Whether a key that is built by this recipe may be this one; which tensor a recipe gives is not asked."""
    if isinstance(recipe, ConstantItem):
        return bool(item_key(recipe.value) == item_key(key))
    return isinstance(recipe, TensorItem) and isinstance(key, torch.Tensor)
