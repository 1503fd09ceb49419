"""Backwards of independent outputs, one after the other, through the one node of autograd that a compiled function is.

``a, b = compiled(x)`` with ``a`` and ``b`` computed from different parameters: eager takes ``a.backward()`` and then
``b.backward()``. torch frees all that a node has saved after the first one, so what the other outputs need is kept apart. This
is core, as first-order gradients need it (see :mod:`dovetail.aot.independence`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.runtime.saved_values import FREED, SavedValues, keep_some

Pattern = tuple[bool, ...]


class Independence:
    """What is still there for which outputs after a backward.

    ``freed_by_backward`` says for each differentiable output which ones a backward from it leaves without theirs;
    ``needed(pattern)`` which of the saved values a backward from these outputs takes.
    """

    def __init__(self, freed_by_backward: Sequence[frozenset[int]], needed: Callable[[Pattern], Sequence[int]]) -> None:
        self._freed_by = freed_by_backward
        self._needed = functools.lru_cache(maxsize=64)(needed)

    def check(self, freed: frozenset[int], defined: Pattern) -> None:
        """Raise eager's error for an output whose saved values are freed."""
        if any(defined[index] for index in freed):
            raise RuntimeError(FREED)

    def after(self, freed: frozenset[int], defined: Pattern) -> frozenset[int]:
        """The outputs that have no backward any more after one from those that are ``defined``."""
        return freed.union(*(item for item, flag in zip(self._freed_by, defined, strict=True) if flag))

    def wanted(self, defined: Pattern) -> Sequence[int] | None:
        """Which of the saved values a backward from the outputs that are ``defined`` takes; None: all."""
        return None if all(defined) else self._needed(defined)

    def keep(self, values: Sequence[Any] | SavedValues, freed: frozenset[int]) -> list[Any] | None:
        """Of the saved values those that the other outputs need; None if there is no such output."""
        rest = tuple(index not in freed for index in range(len(self._freed_by)))
        return keep_some(values, self._needed(rest)) if any(rest) else None
