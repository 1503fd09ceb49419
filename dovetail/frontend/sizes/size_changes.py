"""Sizes and numbers that were seen to change from call to call: the next capture makes them symbolic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.aot.capture_result import BreakSymbols, NamesAfter
from dovetail.guards import Equals, TensorMatch
from dovetail.guards.reading import FETCH_ERRORS
from dovetail.runtime.entry import Entry
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
        """The same and numbers that will change, whether they have or not."""
        return SizeChanges(self.sizes, self.numbers | frozenset(names))

    def with_symbols(self, symbols: BreakSymbols, names: NamesAfter) -> SizeChanges:
        """The same and, after a graph break, what was symbolic before it."""
        found = _Found(self)
        for name, dims in symbols.sizes_after(names):
            found.add_sizes(name, dims)
        found.numbers |= symbols.numbers_after(names)
        return found.frozen()

    def with_call(
        self, entries: Sequence[Entry], callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> SizeChanges:
        """The same and the differences between a call and what the entries were made for, none of which takes the call."""
        found = _Found(self)
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
                    found.add_number(name, predicate.value, value)
                elif issubclass(type(value), torch.Tensor):
                    found.add_shape(name, frozen.tensors[predicate.index].facts.shape, value.shape)
        return found.frozen()

    def shapes(
        self, dynamic: bool | None, allows_symbols: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ShapePolicy:
        """Which sizes and numbers are symbolic in the next capture; ``dynamic`` is the option."""
        if dynamic is False or not allows_symbols:
            return ShapePolicy(allowed=False)
        leaves = private_trees.tree_leaves((args, dict(kwargs)))
        return ShapePolicy(
            everything=dynamic is True,
            sizes=self.sizes,
            numbers=self.numbers,
            marked=any(issubclass(type(leaf), torch.Tensor) and bool(marks_of(leaf)) for leaf in leaves),
        )


class _Found:
    """Changes under construction."""

    def __init__(self, known: SizeChanges) -> None:
        self._known = known
        self._sizes = dict(known.sizes)
        self.numbers = set(known.numbers)

    def frozen(self) -> SizeChanges:
        return SizeChanges(self._sizes, frozenset(self.numbers))

    def add_sizes(self, name: str, dims: frozenset[int]) -> None:
        self._sizes[name] = self._sizes.get(name, frozenset()) | dims

    def add_shape(self, name: str, then: Sequence[int | None], now: torch.Size) -> None:
        if len(now) == len(then):
            dims = frozenset(dim for dim, size in enumerate(then) if size is not None and size != now[dim])
            if dims:
                self.add_sizes(name, dims)

    def add_number(self, name: str, then: Any, now: Any) -> None:
        """Note a number that is another one now, or a tuple with such items."""
        kind = type(now)
        if kind is not type(then) or kind not in (int, float, tuple, torch.Size):
            return
        if kind in (tuple, torch.Size):
            are_numbers = all(type(item) in (int, float) for item in (*then, *now))
            if not are_numbers or len(then) != len(now) or then == now:
                return
            for position, pair in enumerate(zip(then, now, strict=True)):
                self.add_number(f"{name}[{position}]", *pair)
        if now != then:
            self.numbers.add(name)
