"""What was seen to change from call to call: these sizes and numbers become symbolic at the next capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.frontend.breaks.symbols import BreakSymbols, NamesAfter
from dovetail.guards import Equals, ItemSource, TensorMatch
from dovetail.guards.reading import FETCH_ERRORS
from dovetail.runtime.entry import Entry
from dovetail.torch_private import trees as private_trees
from dovetail.trace import ShapePolicy, marks_of


class SizeChanges:
    """The record of one compiled function, by the names of the sources."""

    def __init__(self) -> None:
        self._sizes: dict[str, set[int]] = {}
        self._numbers: set[str] = set()

    @property
    def has_sizes(self) -> bool:
        """Whether a size of a tensor was seen to change."""
        return bool(self._sizes)

    def expect(self, symbols: BreakSymbols, names: NamesAfter) -> None:
        """Take what was symbolic before a graph break for what changes after it."""
        for name, dims in symbols.sizes_after(names):
            self._sizes.setdefault(name, set()).update(dims)
        self._numbers |= symbols.numbers_after(names)

    def learn(self, entries: Sequence[Entry], callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare a call that no entry fits with what each entry was made for."""
        for entry in entries:
            frozen = entry.checker.guards
            self._learn_rates(entry)
            for guard in frozen.guards:
                predicate = guard.predicate
                if not isinstance(predicate, (Equals, TensorMatch)):
                    continue
                try:
                    value = guard.source.fetch(callee, args, kwargs)
                except FETCH_ERRORS:
                    continue
                name = guard.source.name
                if isinstance(predicate, Equals):
                    self._learn_number(name, predicate.value, value)
                elif issubclass(type(value), torch.Tensor):
                    shape = frozen.tensors[predicate.index].facts.shape
                    if value.dim() == len(shape):
                        changed = {d for d, then in enumerate(shape) if then is not None and then != value.shape[d]}
                        if changed:
                            self._sizes.setdefault(name, set()).update(changed)

    def _learn_rates(self, entry: Entry) -> None:
        """A rate that a schedule writes after each call will change, although it may not have changed yet."""
        if any(effect.kind == "call" for effect in entry.effects):
            for guard in entry.checker.guards.guards:
                source = guard.source
                if isinstance(source, ItemSource) and source.key == "lr" and isinstance(guard.predicate, Equals):
                    self._numbers.add(source.name)

    def _learn_number(self, name: str, then: Any, now: Any) -> None:
        if type(now) is not type(then) or type(now) not in (int, float, tuple, torch.Size):
            return
        if type(now) in (tuple, torch.Size):
            numbers = all(type(item) in (int, float) for item in (*then, *now))
            if not numbers or len(then) != len(now) or then == now:
                return
            for position, pair in enumerate(zip(then, now, strict=True)):
                self._learn_number(f"{name}[{position}]", *pair)
        if now != then:
            self._numbers.add(name)

    def policy(
        self, dynamic: bool | None, takes_program: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ShapePolicy:
        """What is symbolic in the next capture. A program tape has no symbols, so that a backend of programs gets none."""
        if dynamic is False or takes_program:
            return ShapePolicy(allowed=False)
        leaves = private_trees.tree_leaves((args, dict(kwargs)))
        return ShapePolicy(
            everything=dynamic is True,
            sizes={name: frozenset(dims) for name, dims in self._sizes.items()},
            numbers=frozenset(self._numbers),
            marked=any(issubclass(type(leaf), torch.Tensor) and bool(marks_of(leaf)) for leaf in leaves),
        )
