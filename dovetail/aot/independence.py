"""Which outputs of a function can be differentiated one after the other without ``retain_graph``.

This is core: ``generator_loss.backward(); critic_loss.backward()`` over two results of one compiled function needs it for its
first-order gradients. Eager frees what the nodes that a backward has passed have saved. Another output keeps its own backward
unless it leads to one of these nodes. A compiled function is one node of autograd, whose saved tensors are all freed at once;
:func:`freed_by_backward` says what has to be kept (:mod:`dovetail.runtime.independence`).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch


def freed_by_backward(roots: Sequence[torch.Tensor]) -> tuple[frozenset[int], ...] | None:
    """For each root the roots (itself too, perhaps) that its backward leaves without a backward; None if always all.

    >>> one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
    >>> shared = one.sin()
    >>> [sorted(found) for found in freed_by_backward([shared * 2, shared + 1, two.exp()])]
    [[0, 1], [0, 1], [2]]
    """
    passed = _passed_by(roots)
    found: list[set[int]] = [set() for _ in roots]
    for mask in {mask for node, mask in passed.items() if _saves(node)}:
        members = [index for index in range(len(roots)) if mask >> index & 1]
        for index in members:
            found[index].update(members)
    if all(len(item) == len(roots) for item in found):
        return None
    return tuple(map(frozenset, found))


def _passed_by(roots: Sequence[torch.Tensor]) -> dict[Any, int]:
    """The nodes of the autograd graph, each with a mask of the roots that lead to it."""
    masks: dict[Any, int] = {}
    for index, root in enumerate(roots):
        masks[root.grad_fn] = masks.get(root.grad_fn, 0) | 1 << index
    for node in reversed(_children_first(list(masks))):
        for following, _ in node.next_functions:
            if following is not None:
                masks[following] = masks.get(following, 0) | masks[node]
    return masks


def _children_first(starts: Sequence[Any]) -> list[Any]:
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(node, False) for node in starts]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    return order


def _saves(node: Any) -> bool:
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
