"""Backwards of independent outputs, one after the other, through the one node of autograd that a compiled function is.

``a, b = compiled(x)`` with ``a`` and ``b`` computed from different parameters: eager takes ``a.backward()`` and then
``b.backward()``. torch frees all that a node has saved after the first one, so what the other outputs need is kept apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail.runtime.higher_order import FREED

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

    def keep(self, values: Sequence[Any], freed: frozenset[int]) -> list[Any] | None:
        """Of the saved values those that the other outputs need; None if there is no such output."""
        rest = tuple(index not in freed for index in range(len(self._together)))
        if not any(rest):
            return None
        needed = self.needed(rest)
        chosen = range(len(values)) if needed is None else needed
        kept: list[Any] = [None] * len(values)
        for index in chosen:
            kept[index] = _Kept(values[index])
        return kept


class _Kept:
    """One saved value: a tensor with its version, without the autograd node that it may be a result of."""

    __slots__ = ("_is_tensor", "_value")

    def __init__(self, value: Any) -> None:
        self._is_tensor = isinstance(value, torch.Tensor)
        # A result of the node that keeps it would be a cycle that nobody collects.
        self._value = private.make_saved_tensor(value.detach()) if self._is_tensor else value

    def unpack(self) -> Any:
        """The value; eager's error for one that was written to."""
        return self._value.unpack() if self._is_tensor else self._value


def unpack(kept: Sequence[Any]) -> list[Any]:
    """The values that :meth:`Independence.keep` has kept, None for the others."""
    return [None if item is None else item.unpack() for item in kept]
