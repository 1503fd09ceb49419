"""How a call's result is built from the graph's tensors: a tree made once at capture, walked at every call.

Objects are made with ``__new__`` and filled, so that shared objects stay shared and cycles close.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import CaptureError

Fetch = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Recipe:
    """Base of all recipe nodes."""


@dataclass(frozen=True)
class TensorItem(Recipe):
    """Tensor ``index`` of the runtime function's results."""

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
class SliceItem(Recipe):
    """A slice whose parts are built."""

    parts: tuple[Recipe, Recipe, Recipe]


@dataclass(frozen=True)
class ObjectItem(Recipe):
    """A mutable object: contents of a list, set, deque or dictionary (or a subclass), and attributes."""

    cls: type
    number: int
    items: tuple[Recipe, ...] = ()
    pairs: tuple[tuple[Recipe, Recipe], ...] = ()
    attributes: tuple[tuple[str, Recipe], ...] = ()


@dataclass(frozen=True)
class SharedItem(Recipe):
    """The object that was built as ``number`` already."""

    number: int


class _Builder:
    def __init__(self, classify: Callable[[Any], Recipe | None]) -> None:
        self._classify = classify
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []

    def build(self, value: Any) -> Recipe:
        found = self._classify(value)
        if found is not None:
            return found
        number = self._numbers.get(id(value))
        if number is not None:
            return SharedItem(number)
        if isinstance(value, slice):
            return SliceItem((self.build(value.start), self.build(value.stop), self.build(value.step)))
        number = self._numbers[id(value)] = len(self._alive)
        self._alive.append(value)
        kind = type(value)
        if isinstance(value, tuple):
            return TupleItem(kind, tuple(self.build(item) for item in tuple.__iter__(value)), number)
        return self._object(value, kind, number)

    def _object(self, value: Any, kind: type, number: int) -> ObjectItem:
        items: tuple[Recipe, ...] = ()
        pairs: tuple[tuple[Recipe, Recipe], ...] = ()
        if isinstance(value, dict):
            if type(value) is collections.defaultdict:
                raise self._refuse(value)
            base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            pairs = tuple((self.build(key), self.build(item)) for key, item in base.items(value))
        elif isinstance(value, (list, set, collections.deque)):
            items = tuple(self.build(item) for item in value)
        elif isinstance(value, (torch.nn.Module, types.FunctionType, types.MethodType, types.GeneratorType, type)):
            raise self._refuse(value)
        attributes = []
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            attributes += [(name, self.build(item)) for name, item in own.items()]
        for owner in kind.__mro__:
            slots = owner.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    attributes.append((name, self.build(getattr(value, name))))
        builtin = isinstance(value, (dict, list, set, collections.deque))
        if not builtin and not isinstance(own, dict) and not attributes and kind is not object:
            raise self._refuse(value)
        return ObjectItem(kind, number, items, pairs, tuple(attributes))

    @staticmethod
    def _refuse(value: Any) -> CaptureError:
        return CaptureError(
            f"a {type(value).__module__}.{type(value).__qualname__} made by the function leaves it",
            advice="return tensors, numbers, containers or plain objects",
        )


def build_recipe(value: Any, classify: Callable[[Any], Recipe | None]) -> Recipe:
    """The recipe for a result. ``classify`` says what a tensor, constant or pre-existing object is; None means: walk into it.

    Raises :class:`CaptureError` for an object that cannot be built again.

    >>> rebuild(build_recipe([1, (2, 3)], lambda v: ConstantItem(v) if isinstance(v, int) else None), [], None, (), {})
    [1, (2, 3)]
    """
    return _Builder(classify).build(value)


def rebuild(
    recipe: Recipe,
    tensors: list[torch.Tensor],
    callee: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    memo: dict[int, Any] | None = None,
) -> Any:
    """Build the result of one call. ``memo`` is handed on where several recipes of one call share objects."""
    kind = type(recipe)
    if kind is TensorItem:
        return tensors[recipe.index]  # type: ignore[attr-defined]
    if kind is ConstantItem:
        return recipe.value  # type: ignore[attr-defined]
    return _rebuild(recipe, tensors, callee, args, kwargs, {} if memo is None else memo)


def _rebuild(recipe: Any, tensors: Any, callee: Any, args: Any, kwargs: Any, memo: dict[int, Any]) -> Any:
    kind = type(recipe)
    if kind is TensorItem:
        return tensors[recipe.index]
    if kind is ConstantItem:
        return recipe.value
    if kind is SourceItem:
        return recipe.fetch(callee, args, kwargs)
    if kind is SharedItem:
        return memo[recipe.number]

    def make(item: Any) -> Any:
        return _rebuild(item, tensors, callee, args, kwargs, memo)

    if kind is SliceItem:
        return slice(*[make(item) for item in recipe.parts])
    if kind is TupleItem:
        items = [make(item) for item in recipe.items]
        cls = recipe.cls
        # torch's return types (of max, sort, ...) are made by their own constructor only.
        built = cls(items) if hasattr(cls, "n_sequence_fields") else tuple.__new__(cls, items)
        memo[recipe.number] = built
        return built
    cls = recipe.cls
    result = memo[recipe.number] = cls.__new__(cls)
    if recipe.pairs or isinstance(result, dict):
        base: Any = collections.OrderedDict if isinstance(result, collections.OrderedDict) else dict
        for key, item in recipe.pairs:
            base.__setitem__(result, make(key), make(item))
    for item in recipe.items:
        if isinstance(result, set):
            set.add(result, make(item))
        else:
            result.append(make(item))
    for name, item in recipe.attributes:
        object.__setattr__(result, name, make(item))
    return result
