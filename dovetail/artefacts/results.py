"""The result of a call as data: how it is built from the graph's tensors.

>>> build_result({"dict": [["loss", {"tensor": 0}], ["steps", 3]]}, ["a tensor"])
{'loss': 'a tensor', 'steps': 3}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.runtime.recipe import ConstantItem, ObjectItem, Recipe, TensorItem, TupleItem


@dataclass(frozen=True)
class StoredResult(Recipe):
    """The result of a loaded graph, as the file has it."""

    data: Any


class _NotStorable(Exception):
    """A part of a result is of a class that a file cannot name."""


def encode_result(recipe: Recipe | None, count: int) -> Any:
    """A result as data. One with a part of a class that a file cannot name becomes the flat tuple of its ``count`` tensors."""
    try:
        return _encode(recipe)
    except _NotStorable:
        return {"tuple": [{"tensor": index} for index in range(count)]}


def _encode(recipe: Recipe | None) -> Any:
    if isinstance(recipe, StoredResult):
        return recipe.data
    if isinstance(recipe, TensorItem):
        return {"tensor": recipe.index}
    if isinstance(recipe, ConstantItem) and type(recipe.value) in (type(None), bool, int, str):
        return recipe.value
    if isinstance(recipe, ConstantItem) and type(recipe.value) is float:
        return {"float": recipe.value.hex()}
    if isinstance(recipe, TupleItem) and recipe.cls is tuple:
        return {"tuple": list(map(_encode, recipe.items))}
    if isinstance(recipe, ObjectItem) and not recipe.attributes:
        if recipe.cls is list:
            return {"list": list(map(_encode, recipe.items))}
        if recipe.cls is dict and not recipe.items:
            pairs = [[_encode(key), _encode(item)] for key, item in recipe.pairs]
            if all(type(key) in (str, int, bool) for key, _ in pairs):
                return {"dict": pairs}
    raise _NotStorable


def build_result(data: Any, tensors: Sequence[Any]) -> Any:
    """A call's result from its data and the graph's tensors. Raises ValueError or IndexError where the data is wrong."""
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float.fromhex(content)
    if kind == "dict":
        if any(not isinstance(key, (str, int)) for key, _ in content):
            raise ValueError("a dictionary has a key that is no constant")
        return {key: build_result(item, tensors) for key, item in content}
    items = [build_result(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
