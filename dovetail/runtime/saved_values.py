"""What a call has saved for its backward, value by value, with eager's errors for what was freed or written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.torch_private import autograd as private_autograd

FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors after "
    "calling backward."
)
"""Eager's text."""


def is_of_write(error: RuntimeError) -> bool:
    """Whether an error says that a saved tensor was written to."""
    return "modified by an inplace operation" in str(error)


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
        items = [next(following) if entry is None else KeptValue(entry[0]) for entry in constants]
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

    def at(self, wanted: Sequence[int] | None) -> list[Any]:
        """The values at some places, None at the others; all of them for None."""
        if wanted is None:
            wanted = [index for index, item in enumerate(self._items) if item is not None]
        values: list[Any] = [None] * len(self)
        for index in wanted:
            values[index] = self[index]
        return values


class KeptValue:
    """One saved value: a tensor with its version, without the autograd node that it may be a result of; or a constant."""

    __slots__ = ("_is_tensor", "_value")

    def __init__(self, value: Any) -> None:
        self._is_tensor = isinstance(value, torch.Tensor)
        # A result of the node that keeps it would be a cycle that nobody collects.
        self._value = private_autograd.make_saved_tensor(value.detach()) if self._is_tensor else value

    def unpack(self) -> Any:
        """The value; raises eager's error for a tensor that was written to."""
        return self._value.unpack() if self._is_tensor else self._value


class WrittenValue:
    """A saved tensor that was written to before it was needed."""

    __slots__ = ("_error",)

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def unpack(self) -> Any:
        """Raise eager's error."""
        raise self._error


def keep_some(values: Sequence[Any] | SavedValues, chosen: Sequence[int]) -> list[Any]:
    """Keep some of the saved values apart from their node, None in the places of the others."""
    kept: list[Any] = [None] * len(values)
    for index in chosen:
        try:
            kept[index] = KeptValue(values[index])
        except RuntimeError as error:
            kept[index] = WrittenValue(error)
    return kept


def unpack(kept: Sequence[Any]) -> list[Any]:
    """The values that :func:`keep_some` has kept, None for the others."""
    return [None if item is None else item.unpack() for item in kept]
