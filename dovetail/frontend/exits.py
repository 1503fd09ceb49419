"""What is symbolic among the live values at a graph break.

What follows is captured by itself, with values that have plain sizes again. A size that did not change from the first call to
the second, because it was rounded up to a window, say, would be taken for fixed there. The part before the break knows better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType
from typing import Any

import torch

from dovetail import torch_private_sizes as private_sizes

_MOST_NESTING = 4
Place = tuple[int, str]
Moved = Mapping[int, Sequence[str]]
"""Where each live value is after a graph break: the names of what was there before, by position."""


def moved(before: Sequence[Any], after: Sequence[Any], names: Sequence[str]) -> Moved:
    """Which of the values after a break were there before it; only ever a guess where they are numbers.

    >>> shape = torch.Size([2, 3])
    >>> moved([1000, shape], [shape], ["stack[0]"])
    {1: ['stack[0]']}
    """
    positions: dict[int, list[int]] = {}
    for position, value in enumerate(before):
        positions.setdefault(id(value), []).append(position)
    found: dict[int, list[str]] = {}
    for value, name in zip(after, names, strict=True):
        for position in positions.get(id(value), ()):
            found.setdefault(position, []).append(name)
    return found


@dataclass
class SymbolicParts:
    """Sizes and numbers, each by the position of a live value and the way from there, as sources name it: ``(0, "[1]")``.

    ``rests`` are the numbers that are rests of divisions: 0 and 1, which no symbol stands for, are likely among them.
    """

    sizes: dict[Place, set[int]] = field(default_factory=dict)
    numbers: set[Place] = field(default_factory=set)
    rests: set[Place] = field(default_factory=set)

    @staticmethod
    def of(values: Sequence[Any]) -> SymbolicParts:
        """Those of live values.

        >>> SymbolicParts.of([3, (4, 5)])
        SymbolicParts(sizes={}, numbers=set(), rests=set())
        """
        found = SymbolicParts()
        for position, value in enumerate(values):
            found._add((position, ""), value, 0)
        return found

    def merge(self, other: SymbolicParts) -> None:
        """Add those of another capture that breaks at the same place."""
        for place, dims in other.sizes.items():
            self.sizes.setdefault(place, set()).update(dims)
        self.numbers |= other.numbers
        self.rests |= other.rests

    def sizes_after(self, moved: Moved) -> Iterator[tuple[str, set[int]]]:
        """Names of tensors after the break, with their dimensions."""
        for (position, way), dims in self.sizes.items():
            for name in moved.get(position, ()):
                yield name + way, dims

    def numbers_after(self, moved: Moved) -> Iterator[str]:
        """Names of numbers after the break."""
        for position, way in self.numbers:
            for name in moved.get(position, ()):
                yield name + way

    def rests_after(self, moved: Moved) -> Iterator[frozenset[str]]:
        """All names that each of the rests has after the break."""
        for position, way in self.rests:
            yield frozenset(name + way for name in moved.get(position, ()))

    def _add(self, place: Place, value: Any, nesting: int) -> bool:
        """Note what is symbolic in a value; whether it is a symbolic number itself."""
        position, way = place
        kind = type(value)
        if kind in (torch.SymInt, torch.SymFloat):
            is_number = not private_sizes.is_data_number(value)
            if is_number:
                self.numbers.add(place)
            if is_number and private_sizes.is_rest(value):
                self.rests.add(place)
            return is_number
        if isinstance(value, torch.Tensor):
            shape = value.shape if value.layout is torch.strided else ()
            dims = {
                dim
                for dim, size in enumerate(shape)
                if private_sizes.is_symbolic(size) and not private_sizes.is_data_number(size)
            }
            if dims:
                self.sizes[place] = dims
        elif kind in (tuple, list, torch.Size) and nesting < _MOST_NESTING:
            # All of them are looked at.
            flags = [self._add((position, f"{way}[{key}]"), item, nesting + 1) for key, item in enumerate(value)]
            if kind is not list and any(flags):
                self.numbers.add(place)
        elif kind is dict and nesting < _MOST_NESTING:
            for key, item in value.items():
                if type(key) in (str, int):
                    self._add((position, f"{way}[{key!r}]"), item, nesting + 1)
        elif kind is CellType and nesting < _MOST_NESTING:
            try:
                content = value.cell_contents
            except ValueError:
                return False
            self._add((position, f"{way}.cell_contents"), content, nesting + 1)
        return False
