"""Which of the live values at a graph break are symbolic, and which of them the instruction at the break has made.

The code after a graph break is captured by itself, and is called with plain sizes again. A size that happens to be the same in
the first two calls (one that is rounded up to a window, say) would be taken for constant there. The part before the break knows
better: what is symbolic in it stays symbolic after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import CellType
from typing import Any

import torch

from dovetail.aot.capture_result import BreakSymbols, NamesAfter, Place
from dovetail.frontend.code.frame import Unread
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace import ShapePolicy

_MOST_NESTING = 4
# Looking through a table of a million numbers that lives across a break would cost more than it tells.
_MOST_UNREAD_ITEMS = 256
_CONSTANTS = (int, bool, float, complex, str, bytes, type(None))
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def find_symbols(live: Sequence[Any], unchanged: Mapping[int, str], shapes: ShapePolicy) -> BreakSymbols:
    """The symbolic parts of live values.

    ``unchanged`` names values that the capture has only passed on: these count as symbolic where ``shapes`` says so of their
    name, although the capture may never have read them.

    >>> shapes = ShapePolicy(numbers=frozenset({"L['shape'][1]"}))
    >>> sorted(find_symbols([3, (4, 5)], {1: "L['shape']"}, shapes).numbers)
    [(1, ''), (1, '[1]')]
    """
    search = _Search(unchanged, shapes)
    for position, value in enumerate(live):
        if type(value) is not Unread:
            search.visit((position, ""), value, 0)
        elif _is_cheap_to_read(value.value):
            search.visit((position, ""), value.value, 0)
    return BreakSymbols(search.sizes, frozenset(search.numbers), dict(unchanged))


class _Search:
    """Goes through live values and their items."""

    def __init__(self, unchanged: Mapping[int, str], shapes: ShapePolicy) -> None:
        self._unchanged = unchanged
        self._shapes = shapes
        self.sizes: dict[Place, frozenset[int]] = {}
        self.numbers: dict[Place, None] = {}

    def visit(self, place: Place, value: Any, nesting: int) -> bool:
        """Note what is symbolic in a value; returns whether the value itself is a symbolic number."""
        kind = type(value)
        if kind in (int, float, torch.SymInt, torch.SymFloat):
            return self._visit_number(place, value)
        if isinstance(value, torch.Tensor):
            self._visit_tensor(place, value)
        elif nesting < _MOST_NESTING:
            self._visit_items(place, value, nesting + 1)
        return False

    def _name(self, place: Place) -> str | None:
        name = self._unchanged.get(place[0])
        return None if name is None else name + place[1]

    def _visit_number(self, place: Place, value: Any) -> bool:
        is_symbol = private_sizes.is_symbolic(value) and not private_sizes.is_data_number(value)
        if is_symbol or self._name(place) in self._shapes.numbers:
            self.numbers[place] = None
            return True
        return False

    def _visit_tensor(self, place: Place, value: torch.Tensor) -> None:
        shape = value.shape if value.layout is torch.strided else ()
        dims = {
            dim
            for dim, size in enumerate(shape)
            if private_sizes.is_symbolic(size) and not private_sizes.is_data_number(size)
        }
        dims |= self._shapes.sizes.get(self._name(place) or "", frozenset()) if shape else set()
        if dims:
            self.sizes[place] = frozenset(dims)

    def _visit_items(self, place: Place, value: Any, nesting: int) -> None:
        position, way = place
        kind = type(value)
        if kind in (tuple, list, torch.Size):
            # All of them are visited, whatever the first ones are.
            flags = [self.visit((position, f"{way}[{key}]"), item, nesting) for key, item in enumerate(value)]
            if kind is not list and any(flags):
                self.numbers[place] = None
        elif kind is dict:
            for key, item in value.items():
                if type(key) in (str, int):
                    self.visit((position, f"{way}[{key!r}]"), item, nesting)
        elif kind is CellType:
            try:
                content = value.cell_contents
            except ValueError:
                return
            self.visit((position, f"{way}.cell_contents"), content, nesting)


def _is_cheap_to_read(value: Any) -> bool:
    """Whether reading a value that the program has not read runs nobody's code and takes little time."""
    if type(value) in (tuple, list, torch.Size, dict):
        items = value.values() if type(value) is dict else value
        return len(items) <= _MOST_UNREAD_ITEMS and all(
            type(item) in _TENSORS or isinstance(item, _CONSTANTS) for item in items
        )
    return type(value) in (int, float, *_TENSORS)


def names_after_break(before: Sequence[Any], after: Sequence[Any], names: Sequence[str]) -> NamesAfter:
    """Which values after a break were there before it. For numbers this is a guess: equal ones may be one object.

    >>> shape = torch.Size([2, 3])
    >>> names_after_break([1000, shape], [shape], ["stack[0]"])
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


def names_made_at_break(
    before: Sequence[Any], names_before: Sequence[str], after: Sequence[Any], names_after: Sequence[str]
) -> frozenset[str]:
    """The names of values that the instruction at a graph break has made: they were not there before it.

    Constants have no identity; a constant was there before if the same name had an equal one.

    >>> sorted(names_made_at_break([[1], True, 2], ["a", "b", "c"], [True, 2, (3,)], ["b", "stack[0]", "stack[1]"]))
    ['stack[0]', 'stack[1]']
    """
    objects = {id(value) for value in before if not isinstance(value, _CONSTANTS)}
    constants = {name: value for name, value in zip(names_before, before, strict=True) if isinstance(value, _CONSTANTS)}

    def was_there(name: str, value: Any) -> bool:
        if name in constants and type(constants[name]) is type(value) and constants[name] == value:
            return True
        return id(value) in objects

    return frozenset(name for value, name in zip(after, names_after, strict=True) if not was_there(name, value))
