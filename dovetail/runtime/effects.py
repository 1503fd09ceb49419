"""What a call changes outside of itself, replayed after the graph has run: containers, attributes, gradients."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.guards import Source
from dovetail.runtime.recipe import ConstantItem, ObjectItem, Recipe, TensorItem, rebuild, set_states
from dovetail.runtime.recipe_code import generate


@dataclass(frozen=True)
class EffectRecipe:
    """One container that is brought to its final state after the graph has run, or (``"call"``) a function that is called."""

    source: Source
    kind: str
    values: Recipe
    deleted: tuple[Any, ...] = ()


class Effects:
    """The effects of one entry, sorted into those that are cheap and the rest.

    A step of a model with 82 parameters sets 82 gradients: finding each parameter by its source and building a dictionary for
    each took 0.35 ms of 1.6 ms. The parameters are inputs of the graph, so they are at hand.
    """

    def __init__(self, recipe: Recipe | None, effects: Sequence[EffectRecipe], inputs: Sequence[Source]) -> None:
        places = {source: index for index, source in enumerate(inputs)}
        self._recipe = recipe
        self._attributes: list[tuple[int, str, int]] = []
        self._rest: list[EffectRecipe] = []
        for effect in effects:
            found = _plain_attributes(effect)
            if found is None or effect.source not in places:
                self._rest.append(effect)
            else:
                self._attributes += [(places[effect.source], name, index) for name, index in found]
        self._build = None if recipe is None else generate(recipe)
        #: What is written into a plain dictionary, where that is the same at every call.
        constants = [_constant_items(effect) for effect in self._rest]
        self._constants = [items for items in constants if items is not None]
        self._is_constant = len(self._constants) == len(constants) and not self._attributes
        builds = [generate(effect.values) for effect in self._rest]
        # Where nothing is shared between them, each is built by itself.
        self._builds = None if self._build is None or None in builds else builds

    def apply(
        self,
        tensors: Sequence[torch.Tensor],
        results: list[torch.Tensor],
        callee: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Build the result of the call, then make all changes; ``tensors`` are the graph's inputs, ``results`` its results."""
        if self._is_constant and self._build is not None:
            containers = [effect.source.fetch(callee, args, kwargs) for effect in self._rest]
            result = self._build(results, callee, args, kwargs)
            for items, container in zip(self._constants, containers, strict=True):
                _write_items(container, items)
            return result
        memo: dict[int, Any] = {}
        if self._rest:
            # Containers are fetched before the first of them is changed: one may be reached through another.
            containers = [effect.source.fetch(callee, args, kwargs) for effect in self._rest]
        if self._builds is not None and self._build is not None:
            values = [build(results, callee, args, kwargs) for build in self._builds]  # type: ignore[misc]
            result = self._build(results, callee, args, kwargs)
        else:
            assert self._recipe is not None
            values = [rebuild(effect.values, results, callee, args, kwargs, memo) for effect in self._rest]
            result = rebuild(self._recipe, results, callee, args, kwargs, memo)
        set_attribute = object.__setattr__
        for place, name, index in self._attributes:
            set_attribute(tensors[place], name, results[index])
        if self._rest:
            for effect, container, value in zip(self._rest, containers, values, strict=True):
                _apply(effect, container, value)
        set_states(memo)
        return result


def _plain_attributes(effect: EffectRecipe) -> list[tuple[str, int]] | None:
    """Names of attributes, and which of the graph's results they are set to; None where it is more than that."""
    values = effect.values
    if effect.kind != "attribute" or effect.deleted or not isinstance(values, ObjectItem) or values.cls is not dict:
        return None
    found = []
    for key, item in values.pairs:
        if not isinstance(key, ConstantItem) or not isinstance(item, TensorItem):
            return None
        found.append((key.value, item.index))
    return found


def _constant_items(effect: EffectRecipe) -> dict[Any, Any] | None:
    """The items that are written into a dictionary, where they are constants; None where it is more than that."""
    values = effect.values
    if effect.kind != "dict" or effect.deleted or not isinstance(values, ObjectItem) or values.cls is not dict:
        return None
    items: dict[Any, Any] = {}
    for key, item in values.pairs:
        if not isinstance(key, ConstantItem) or not isinstance(item, ConstantItem):
            return None
        items[key.value] = item.value
    return items


def _write_items(container: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    """Past the container's own class; one call for a plain dictionary."""
    if type(container) is dict:
        container.update(items)
        return
    # An ordered dictionary keeps a list of its keys beside the table, which dict's own methods would not maintain.
    base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
    for key, item in items.items():
        base.__setitem__(container, key, item)


def _apply(effect: EffectRecipe, container: Any, value: Any) -> None:
    if isinstance(container, types.CellType):
        container.cell_contents = value
    elif effect.kind == "dict":
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        for key in effect.deleted:
            base.pop(container, key, None)
        _write_items(container, value)
    elif effect.kind == "ordered dict":
        base = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        _write_items(container, value)
    elif effect.kind == "attribute":
        setter: Any = type if isinstance(container, type) else object
        for name in effect.deleted:
            if hasattr(container, name):
                setter.__delattr__(container, name)
        for name, item in value.items():
            setter.__setattr__(container, name, item)
    elif effect.kind == "deque":
        container.clear()
        container.extend(value)
    elif effect.kind == "call":
        function, args, keywords = value
        function(*args, **keywords)
    elif effect.kind == "append":
        list.extend(container, value)
    elif effect.kind == "list":
        list.__setitem__(container, slice(None), value)
    else:
        removed, added = value
        set.difference_update(container, removed)
        set.update(container, added)
