"""Sizes and numbers that were seen to change from call to call: the next capture makes them symbolic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.guards import Equals, TensorMatch
from dovetail.guards.reading import FETCH_ERRORS
from dovetail.runtime.entry import Entry
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import trees as private_trees
from dovetail.trace import ShapePolicy, marks_of


@dataclass(frozen=True)
class SizeChanges:
    """The sizes (dimensions of tensors) and numbers of one compiled function that change, by the names of their sources.

    >>> SizeChanges().with_numbers(["L['rate']"]).shapes(None, True, (), {}).numbers
    frozenset({"L['rate']"})
    """

    sizes: Mapping[str, frozenset[int]] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()

    def with_numbers(self, names: Iterable[str]) -> SizeChanges:
        """These changes, and numbers that will change whether they have or not."""
        return SizeChanges(self.sizes, self.numbers | frozenset(names))

    def with_call(
        self, entries: Sequence[Entry], callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> SizeChanges:
        """These changes, and the differences between a call and the calls of entries that do not take it."""
        sizes, numbers = dict(self.sizes), set(self.numbers)
        for entry in entries:
            frozen = entry.checker.guards
            for guard in frozen.guards:
                predicate, name = guard.predicate, guard.source.name
                if not isinstance(predicate, (Equals, TensorMatch)):
                    continue
                try:
                    value = guard.source.fetch(callee, args, kwargs)
                except FETCH_ERRORS:
                    continue
                if isinstance(predicate, Equals):
                    numbers.update(_changed_numbers(name, predicate.value, value))
                elif issubclass(type(value), torch.Tensor):
                    with private_calls.no_torch_function():
                        dims = _changed_dims(frozen.tensors[predicate.index].facts.shape, value.shape)
                    if dims:
                        sizes[name] = sizes.get(name, frozenset()) | dims
        return SizeChanges(sizes, frozenset(numbers))

    def shapes(
        self, dynamic: bool | None, allows_symbols: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ShapePolicy:
        """The policy of symbolic sizes and numbers for the next capture; ``dynamic`` is the option."""
        if dynamic is False or not allows_symbols:
            return ShapePolicy(allowed=False)
        met: set[int] = set()

        def is_met(item: Any) -> bool:
            # A container may hold itself.
            count = len(met)
            met.add(id(item))
            return len(met) == count

        leaves = private_trees.tree_leaves((args, dict(kwargs)), is_leaf=is_met)
        return ShapePolicy(
            everything=dynamic is True,
            sizes=self.sizes,
            numbers=self.numbers,
            marked=any(issubclass(type(leaf), torch.Tensor) and bool(marks_of(leaf)) for leaf in leaves),
        )


def _changed_dims(then: Sequence[int | None], now: torch.Size) -> frozenset[int]:
    if len(now) != len(then):
        return frozenset()
    return frozenset(dim for dim, size in enumerate(then) if size is not None and size != now[dim])


def _changed_numbers(name: str, then: Any, now: Any) -> Iterator[str]:
    """The names of a number that is another one now, or of a tuple of leaves and its numbers that are."""
    kind = type(now)
    if kind is not type(then) or kind not in (int, float, tuple, torch.Size) or now == then:
        return
    if kind in (int, float):
        yield name
    elif len(then) == len(now):
        pairs = enumerate(zip(then, now, strict=True))
        items = [item for position, pair in pairs for item in _changed_numbers(f"{name}[{position}]", *pair)]
        yield from [*items, name] if items else ()
