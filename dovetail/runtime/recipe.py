"""How a call's result is built from the graph's tensors: a tree made once at capture (:mod:`dovetail.runtime.recipe_builder`),
from which a function is generated (:mod:`dovetail.runtime.recipe_code`).

Objects that are shared, or that lead back to themselves, have a number; a :class:`SharedItem` refers to it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Fetch = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Recipe:
    """Base of all recipe nodes."""


@dataclass(frozen=True)
class TensorItem(Recipe):
    """Tensor ``index`` of the runtime function's results."""

    index: int


@dataclass(frozen=True)
class NumberItem(Recipe):
    """A number computed from the sizes of the inputs: number ``index`` from the end of the runtime function's results."""

    index: int


@dataclass(frozen=True)
class SourceItem(Recipe):
    """An object that existed before the call, found again by its source."""

    fetch: Fetch


@dataclass(frozen=True)
class ConstantItem(Recipe):
    """A value that is the same at every call."""

    value: Any


@dataclass(frozen=True)
class TupleItem(Recipe):
    """A tuple, a named tuple or one of torch's return types."""

    cls: type
    items: tuple[Recipe, ...]
    number: int = -1


@dataclass(frozen=True)
class ObjectItem(Recipe):
    """A mutable object: contents of a list, set, deque or dictionary (or a subclass), and attributes."""

    cls: type
    number: int
    items: tuple[Recipe, ...] = ()
    pairs: tuple[tuple[Recipe, Recipe], ...] = ()
    attributes: tuple[tuple[str, Recipe], ...] = ()


@dataclass(frozen=True)
class CallItem(Recipe):
    """An object that ``function(*items)`` returns: an iterator, a bound method, an exception, a suspended generator.

    ``fill(object, *parts)`` puts in what may lead back to it. Iterators get their ``state`` when all else is done.
    """

    function: ConstantItem
    items: tuple[Recipe, ...]
    number: int = -1
    state: Recipe | None = None
    fill: ConstantItem | None = None
    parts: tuple[Recipe, ...] = ()


@dataclass(frozen=True)
class CellItem(Recipe):
    """A closure cell; its content may lead back to it."""

    content: Recipe | None
    number: int


@dataclass(frozen=True)
class FunctionItem(Recipe):
    """A function that was defined inside; ``parts`` are its defaults, attributes, annotations and names."""

    code: types.CodeType
    globals: dict[str, Any]
    closure: tuple[CellItem | SharedItem | SourceItem, ...] | None
    parts: tuple[Recipe, ...]
    annotations: str
    number: int


@dataclass(frozen=True)
class SharedItem(Recipe):
    """The object that was built as ``number`` already."""

    number: int


def native_new(cls: type) -> Any:
    """The ``__new__`` of the nearest builtin base of a class: its own would run the user's code."""
    for owner in cls.__mro__:
        maker = owner.__dict__.get("__new__")
        if maker is not None and not isinstance(maker, staticmethod):
            return maker
    return object.__new__
