"""In which order eager runs the nodes of a backward.

The engine hook visits them in another order than the engine runs them. Sums of three gradients and hooks can tell, so the
order is worked out from the nodes themselves: ready nodes run from the newest to the oldest, leaves before all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.trace.overrides import LEAF_ORDERS


@dataclass(frozen=True)
class BackwardCall:
    """The arguments of one ``backward()`` or ``grad()``: where it starts and where it ends."""

    roots: tuple[Any, ...]
    targets: tuple[Any, ...]
    accumulate: bool
    keep_graph: bool = False
    create_graph: bool = False


class _Walk:
    """The nodes that a backward reaches, how many gradients each waits for, and which of them run."""

    def __init__(self, call: BackwardCall) -> None:
        self.call = call
        self.next_of: dict[Any, list[Any]] = {}
        self.waiting: dict[Any, int] = {}
        self._reach(call.roots)
        self._runs: dict[Any, bool] | None = None
        if call.targets:
            self._runs = self._needed()

    def _reach(self, roots: Sequence[Any]) -> None:
        stack = list(dict.fromkeys(roots))
        seen = set(stack)
        for node in roots:
            self.waiting[node] = self.waiting.get(node, 0) + 1
        while stack:
            node = stack.pop()
            following = [target for target, _ in node.next_functions if target is not None]
            self.next_of[node] = following
            for target in following:
                self.waiting[target] = self.waiting.get(target, 0) + 1
                if target not in seen:
                    seen.add(target)
                    stack.append(target)

    def _needed(self) -> dict[Any, bool]:
        """For each node whether it computes something; nodes that are only asked for their gradient are False."""
        targets = set(self.call.targets)
        found: dict[Any, bool] = {}
        for root in self.call.roots:
            stack = [root]
            while stack:
                node = stack[-1]
                if node in found:
                    stack.pop()
                    continue
                open_nodes = [target for target in self.next_of[node] if target not in found]
                if open_nodes:
                    stack.extend(open_nodes)
                    continue
                leads_on = any(found[target] or target in targets for target in self.next_of[node])
                found[node] = leads_on or (self.call.accumulate and node in targets)
                stack.pop()
        return found

    def executes(self, node: Any) -> bool:
        """Whether a gradient is sent to a node at all."""
        return self._runs is None or self._runs.get(node, False) or node in self.call.targets

    def goes_on(self, node: Any) -> bool:
        """Whether the node itself runs, and is not only asked for its gradient."""
        return self._runs is None or self._runs.get(node, False)


def hook_order(call: BackwardCall) -> list[Any]:
    """The nodes in the order in which the engine hook visits them; None stands for the start."""
    walk = _Walk(call)
    waiting = dict(walk.waiting)
    order: list[Any] = []
    worklist: list[Any] = [None]
    while worklist:
        node = worklist.pop()
        order.append(node)
        for target in walk.call.roots if node is None else walk.next_of[node]:
            if not walk.executes(target):
                continue
            waiting[target] -= 1
            if waiting[target] == 0:
                worklist.append(target)
    return order


def eager_order(call: BackwardCall) -> list[Any]:
    """The nodes in the order in which eager runs them; None, the start, comes first."""
    walk = _Walk(call)
    waiting = dict(walk.waiting)
    order: list[Any] = [None]
    queue = _Heap()

    def arrive(target: Any) -> None:
        waiting[target] -= 1
        if waiting[target] == 0:
            queue.push(private_autograd_nodes.sequence_number(target), target)

    for root in call.roots:
        if walk.executes(root):
            arrive(root)
    while queue:
        node = queue.pop()
        order.append(node)
        if walk.goes_on(node):
            for target in walk.next_of[node]:
                if walk.executes(target):
                    arrive(target)
    return order


def will_execute(call: BackwardCall, node: Any) -> bool:
    """Whether a backward comes to a node."""
    walk = _Walk(call)
    return node in walk.next_of and walk.executes(node)


class _Heap:
    """A binary heap with the greatest key on top, which gives out equal keys in the order of libstdc++'s priority queue.

    All leaves have the same key, and a program's hooks see which leaf comes first.
    """

    def __init__(self) -> None:
        self._items: list[tuple[int, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._items)

    def push(self, key: int, value: Any) -> None:
        """Put an item in."""
        self._items.append((key, value))
        self._rise(len(self._items) - 1, 0)

    def _rise(self, hole: int, top: int) -> None:
        items = self._items
        item = items[hole]
        while hole > top:
            parent = (hole - 1) // 2
            if not items[parent][0] < item[0]:
                break
            items[hole] = items[parent]
            hole = parent
        items[hole] = item

    def pop(self) -> Any:
        """Take the item with the greatest key."""
        items = self._items
        result = items[0][1]
        last = items.pop()
        length = len(items)
        if length:
            # The hole goes all the way down along the greater children, then the last item rises from there.
            hole = child = 0
            while child < (length - 1) // 2:
                child = 2 * (child + 1)
                if items[child][0] < items[child - 1][0]:
                    child -= 1
                items[hole] = items[child]
                hole = child
            if length % 2 == 0 and child == (length - 2) // 2:
                child = 2 * child + 1
                items[hole] = items[child]
                hole = child
            items[hole] = last
            self._rise(hole, 0)
        return result


def arrangement_of_leaves(roots: Sequence[Any], leaves: Sequence[Any], count: int, others: int = 0) -> tuple[int, ...]:
    """In which order one node should hand its gradients over, for the leaves to get them in the order in which eager would run
    the backward from ``roots``: all numbers below ``count``, or () if any order will do.

    ``leaves`` has the leaf for each of the node's outputs, None where it leads elsewhere: to ``others`` nodes.
    """
    place = {id(leaf): index for index, leaf in enumerate(leaves) if leaf is not None}
    order = eager_order(BackwardCall(tuple(roots), (), True))
    wanted = [
        place[id(node.variable)] for node in order if node is not None and id(getattr(node, "variable", None)) in place
    ]
    if len(wanted) < 2:
        return ()
    # They are all ready at once, and the queue then has an order of its own for what is equal.
    queue = _Heap()
    for slot in range(len(wanted) + others):
        queue.push(int(slot < len(wanted)), slot)
    slots = [0] * len(wanted)
    for index in wanted:
        slots[queue.pop()] = index
    rest = sorted(set(range(count)) - set(wanted))
    return (*slots, *rest)


LEAF_ORDERS.append(arrangement_of_leaves)
