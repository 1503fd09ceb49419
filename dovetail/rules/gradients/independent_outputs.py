"""Outputs that can be differentiated one after the other without ``retain_graph``.

``a, b = compiled(x)`` with ``a`` and ``b`` computed from different parameters: eager takes ``a.backward()`` and then
``b.backward()``. It frees what the nodes that a backward has passed have saved; another output keeps its own backward unless it
leads to one of these nodes. A compiled function is one node of autograd, and torch frees all that it has saved after the first
backward. So the saved values are kept apart from the node where outputs are independent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.steps import Lowering, finds_freed, saved_apart
from dovetail.rules.gradients.separate_nodes import with_separate_nodes
from dovetail.runtime.derivatives import FREED
from dovetail.runtime.function import Backward, DifferentiableGraph, FlatCallable, KeepApart, Pattern
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.trace.overrides import autograd_nodes
from dovetail.whole_calls.handles import detached


@finds_freed
def freed_by_backward(roots: Sequence[torch.Tensor]) -> tuple[frozenset[int], ...] | None:
    """For each root the roots (itself too, perhaps) that its backward leaves without a backward; None if always all.

    >>> one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
    >>> shared = one.sin()
    >>> [sorted(found) for found in freed_by_backward([shared * 2, shared + 1, two.exp()])]
    [[0, 1], [0, 1], [2]]
    """
    passing: dict[Any, list[int]] = {}
    for index, root in enumerate(roots):
        for node in autograd_nodes([root]):
            passing.setdefault(node, []).append(index)
    found: list[set[int]] = [set() for _ in roots]
    for members in {tuple(members) for node, members in passing.items() if saves(node)}:
        for index in members:
            found[index].update(members)
    if all(len(item) == len(roots) for item in found):
        return None
    return tuple(map(frozenset, found))


def saves(node: Any) -> bool:
    """Whether a backward through the node frees something that another backward needs."""
    if hasattr(node, "variable"):
        return False
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return bool(node._raw_saved_tensors)
    kind: Any = type(node)
    return _kind_saves(kind) or kind.__name__ == "CopySlices"


@functools.lru_cache(maxsize=1024)
def _kind_saves(kind: Hashable) -> bool:
    """Of torch's own node classes only, which live as long as the process."""
    return any(name.startswith("_raw_saved_") for name in dir(kind))


@saved_apart
def keep_apart(lowering: Lowering) -> KeepApart | None:
    """Keep the saved values of each call, where some outputs are independent of others."""
    freed_by, backward = lowering.joint.spec.freed_by_backward, lowering.backward
    if freed_by is None or backward is None:
        return None
    return _Keeping(lowering.joint, freed_by, functools.lru_cache(maxsize=64)(functools.partial(_needed, backward)))


@dataclass(frozen=True, eq=False)
class _Keeping:
    """Keeps the saved values of the calls of one graph; see :class:`dovetail.runtime.function.KeepApart`."""

    joint: JointGraph
    freed_by: Sequence[frozenset[int]]
    needed: Callable[[Pattern], Sequence[int]]

    def __call__(self, saved: Sequence[Any]) -> KeptApart:
        return KeptApart(self.freed_by, self.needed, saved)

    def around(self, graph: DifferentiableGraph) -> FlatCallable:
        """The graph, with several nodes of autograd where a call needs them."""
        return with_separate_nodes(self.joint, self.freed_by, graph)


def _needed(backward: Backward, defined: Pattern) -> Sequence[int]:
    """The saved values that the backward for these tangents takes, by place."""
    found = backward.graph_of(defined)
    return () if found is None else found[1][: len(found[1]) - sum(defined)]


class KeptApart:
    """The saved values of one call, each for as long as an output needs it; see :class:`dovetail.runtime.function.SavedApart`.

    ``freed_by`` says for each differentiable output which ones a backward from it leaves without theirs; ``needed(pattern)`` which
    of the saved values a backward from these outputs takes. In eager, a backward from one output knows nothing of a write to what
    only another one needs: so only these are read.
    """

    def __init__(
        self, freed_by: Sequence[frozenset[int]], needed: Callable[[Pattern], Sequence[int]], saved: Sequence[Any]
    ) -> None:
        self._freed_by = freed_by
        self._needed = needed
        self._freed: frozenset[int] = frozenset()
        # A result of the node that keeps it would be a cycle that nobody collects.
        self._items = [
            private_autograd_nodes.make_saved_tensor(detached(value)) if isinstance(value, torch.Tensor) else value
            for value in saved
        ]
        self._is_tensor = [isinstance(value, torch.Tensor) for value in saved]

    def read(self, defined: Pattern) -> list[Any]:
        """The saved values that a backward from the ``defined`` outputs takes, None in the places of the others."""
        if any(defined[index] for index in self._freed):
            raise RuntimeError(FREED)
        values: list[Any] = [None] * len(self._items)
        for index in range(len(values)) if all(defined) else self._needed(defined):
            item = self._items[index]
            values[index] = item.unpack() if self._is_tensor[index] else item
        return values

    def free(self, defined: Pattern) -> bool:
        """Free what no output needs any more after a backward from those that are ``defined``; whether anything is left."""
        self._freed |= {freed for index, flag in enumerate(defined) if flag for freed in self._freed_by[index]}
        rest = tuple(index not in self._freed for index in range(len(self._freed_by)))
        kept = frozenset(self._needed(rest)) if any(rest) else frozenset()
        self._items = [item if index in kept else None for index, item in enumerate(self._items)]
        return any(rest)
