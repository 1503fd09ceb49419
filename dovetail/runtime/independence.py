"""Backwards of independent outputs, one after the other, through the one node of autograd that a compiled function is.

``a, b = compiled(x)`` with ``a`` and ``b`` computed from different parameters: eager takes ``a.backward()`` and then
``b.backward()``. torch frees all that a node has saved after the first one, so what the other outputs need is kept apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.higher_order.runtime import FREED
from dovetail.torch_private import autograd as private_autograd

Pattern = tuple[bool, ...]


class Independence:
    """What is still there for which outputs after a backward.

    ``together`` says for each differentiable output which ones a backward from it leaves without theirs;
    ``needed(pattern)`` which of the saved values a backward from these outputs takes.
    """

    def __init__(self, together: Sequence[frozenset[int]], needed: Callable[[Pattern], Sequence[int] | None]) -> None:
        self._together = together
        self.needed = functools.lru_cache(maxsize=64)(needed)

    def check(self, freed: frozenset[int], defined: Pattern) -> None:
        """Raise eager's error for an output whose saved values are freed."""
        if any(defined[index] for index in freed):
            raise RuntimeError(FREED)

    def after(self, freed: frozenset[int], defined: Pattern) -> frozenset[int]:
        """The outputs that have no backward any more after one from those that are ``defined``."""
        return freed.union(*(item for item, flag in zip(self._together, defined, strict=True) if flag))

    def wanted(self, defined: Pattern) -> Sequence[int] | None:
        """Which of the saved values a backward from the outputs that are ``defined`` takes; None: all."""
        return None if all(defined) else self.needed(defined)

    def keep(self, values: Sequence[Any] | SavedValues, freed: frozenset[int]) -> list[Any] | None:
        """Of the saved values those that the other outputs need; None if there is no such output."""
        rest = tuple(index not in freed for index in range(len(self._together)))
        if not any(rest):
            return None
        needed = self.needed(rest)
        chosen = range(len(values)) if needed is None else needed
        kept: list[Any] = [None] * len(values)
        for index in chosen:
            try:
                kept[index] = _Kept(values[index])
            except RuntimeError as error:
                kept[index] = _Written(error)
        return kept


class SavedValues:
    """What a node has saved, one by one: ``error`` says that one of them was written to, and is raised for that one only.

    One graph is one node, whose outputs save together. In eager, a backward from one output knows nothing of a write to what
    only another one needs.
    """

    def __init__(self, items: Sequence[Any], error: RuntimeError) -> None:
        self._items = items
        self._error = error
        self._found: dict[int, Any] = {}

    @classmethod
    def of(cls, tensors: Sequence[Any], constants: Sequence[Any] | None, error: RuntimeError) -> SavedValues:
        """Of the node's saved tensors as they are, and of constants (each in a tuple) with None in the places of tensors."""
        if constants is None:
            return cls(tensors, error)
        following = iter(tensors)
        items = [next(following) if entry is None else _Constant(entry[0]) for entry in constants]
        return cls(items, error)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        if index not in self._found:
            try:
                self._found[index] = self._items[index].unpack()
            except RuntimeError:
                # A result of the node itself cannot be unpacked by itself: then it may be that one.
                raise self._error from None
        return self._found[index]

    def those(self, wanted: Sequence[int] | None) -> list[Any]:
        """The values at some places, None at the others; all of them for None."""
        if wanted is None:
            wanted = [index for index, item in enumerate(self._items) if item is not None]
        values: list[Any] = [None] * len(self)
        for index in wanted:
            values[index] = self[index]
        return values


class _Constant:
    """A saved value that is no tensor."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def unpack(self) -> Any:
        """The value."""
        return self._value


class _Written:
    """A saved tensor that was written to before it was needed."""

    __slots__ = ("_error",)

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def unpack(self) -> Any:
        """Eager's error."""
        raise self._error


class _Kept:
    """One saved value: a tensor with its version, without the autograd node that it may be a result of."""

    __slots__ = ("_is_tensor", "_value")

    def __init__(self, value: Any) -> None:
        self._is_tensor = isinstance(value, torch.Tensor)
        # A result of the node that keeps it would be a cycle that nobody collects.
        self._value = private_autograd.make_saved_tensor(value.detach()) if self._is_tensor else value

    def unpack(self) -> Any:
        """The value; eager's error for one that was written to."""
        return self._value.unpack() if self._is_tensor else self._value


def unpack(kept: Sequence[Any]) -> list[Any]:
    """The values that :meth:`Independence.keep` has kept, None for the others."""
    return [None if item is None else item.unpack() for item in kept]
