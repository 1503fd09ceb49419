"""What is symbolic among the live values at a graph break.

What follows is captured by itself, with values that have plain sizes again. A size that did not change from the first call to
the second, because it was rounded up to a window, say, would be taken for fixed there. The part before the break knows better.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType
from typing import Any

import torch

from dovetail.frontend.code.frame import Unread
from dovetail.torch_private import sizes as private_sizes

_MOST_NESTING = 4
# A table of a million numbers that lives across a break is none of sizes.
_MOST_VALUES = 256
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


Layout = tuple[tuple[Any, ...], tuple[Any, ...]]
"""The sizes and the strides of a tensor; None for what the data decide."""


_CONSTANTS = (int, bool, float, complex, str, bytes, type(None))


def made_between(
    before: Sequence[Any], names_before: Sequence[str], after: Sequence[Any], names_after: Sequence[str]
) -> frozenset[str]:
    """The names of what the instruction at a graph break has given: what was not there before.

    Of two constants nobody can say which one it is: one is the same where it has the same name.

    >>> sorted(made_between([[1], True, 2], ["a", "b", "c"], [True, 2, (3,)], ["b", "stack[0]", "stack[1]"]))
    ['stack[0]', 'stack[1]']
    """
    objects = {id(value) for value in before if not isinstance(value, _CONSTANTS)}
    constants = {name: value for name, value in zip(names_before, before, strict=True) if isinstance(value, _CONSTANTS)}
    return frozenset(
        name
        for value, name in zip(after, names_after, strict=True)
        if id(value) not in objects
        and not (name in constants and type(constants[name]) is type(value) and constants[name] == value)
    )


def _is_simple(value: Any) -> bool:
    """Whether a value that the program has not read may be looked at: this runs nobody's code, and does not take long."""
    if type(value) in (tuple, list, torch.Size, dict):
        items = value.values() if type(value) is dict else value
        return len(items) <= _MOST_VALUES and all(
            type(item) in (int, torch.Tensor, torch.nn.Parameter) or isinstance(item, _CONSTANTS) for item in items
        )
    return type(value) in (int, torch.Tensor, torch.nn.Parameter)


@dataclass
class Situation:
    """The sizes, strides and whole numbers among live values that belong together: symbols and all, or the numbers of one call.

    ``passed`` are the names that values have which the part before a break has not touched, by position.
    """

    layouts: dict[Place, Layout] = field(default_factory=dict)
    numbers: dict[Place, Any] = field(default_factory=dict)
    passed: dict[int, str] = field(default_factory=dict)

    def map(self, function: Callable[[Any], Any]) -> Situation:
        """The same with a function applied to every number; numbers that it makes None are left out.

        >>> Situation(numbers={(0, ""): 3}).map(lambda number: number + 1).numbers
        {(0, ''): 4}
        """
        numbers = {place: function(number) for place, number in self.numbers.items()}
        return Situation(
            {
                place: (tuple(map(function, shape)), tuple(map(function, strides)))
                for place, (shape, strides) in self.layouts.items()
            },
            {place: number for place, number in numbers.items() if number is not None},
            self.passed,
        )

    def today(self) -> Situation:
        """What symbols stand for at this call."""
        return self.map(private_sizes.size_today)

    def with_passed(self, given: Expected) -> Situation:
        """The same for a call that is given other numbers and sizes, where these are only passed on."""
        numbers, layouts = dict(self.numbers), dict(self.layouts)
        for position, name in self.passed.items():
            for place in [place for place in numbers if place[0] == position]:
                numbers[place] = given.numbers.get(name + place[1], numbers[place])
            for place in [place for place in layouts if place[0] == position]:
                layouts[place] = given.layouts.get(name + place[1], layouts[place])
        return Situation(layouts, numbers, self.passed)


@dataclass(frozen=True)
class Expected:
    """Sizes and numbers that may come together, by the names of the sources that they are read from, and which sizes change."""

    changing: Mapping[str, Collection[int]] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, dict[int, int]]:
        """The sizes of each tensor."""
        return {name: dict(enumerate(shape)) for name, (shape, _) in self.layouts.items()}

    @property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """The strides of each tensor."""
        return {name: strides for name, (_, strides) in self.layouts.items()}

    def __str__(self) -> str:
        shown = [f"{name}: {'x'.join(map(str, shape)) or 'a number'}" for name, (shape, _) in self.layouts.items()]
        return ", ".join([*(f"{name} = {number}" for name, number in self.numbers.items()), *shown])


@dataclass
class SymbolicParts:
    """Sizes and numbers, each by the position of a live value and the way from there, as sources name it: ``(0, "[1]")``.

    ``formulas`` says what all live values are in the capture that this is of; ``situations`` are what its entries were made
    for, ``near`` what they hand on at other sizes. ``given`` are the positions of values that an instruction at an earlier
    graph break has given, and that nobody has touched since.
    """

    sizes: dict[Place, set[int]] = field(default_factory=dict)
    numbers: set[Place] = field(default_factory=set)
    formulas: Situation = field(default_factory=Situation, repr=False)
    situations: list[Situation] = field(default_factory=list, repr=False)
    near: list[Situation] = field(default_factory=list, repr=False)
    given: set[int] = field(default_factory=set, repr=False)

    @staticmethod
    def of(values: Sequence[Any], passed: Mapping[int, str] | None = None) -> SymbolicParts:
        """Those of live values; ``passed`` names those that are as they were given, by position.

        >>> SymbolicParts.of([3, (4, 5)])
        SymbolicParts(sizes={}, numbers=set())
        """
        found = SymbolicParts(formulas=Situation(passed=dict(passed or {})))
        for position, value in enumerate(values):
            if type(value) is not Unread:
                found._add((position, ""), value, 0)
            elif _is_simple(value.value):
                found._add((position, ""), value.value, 0)
        return found

    def note_passed(self, names: Collection[str], sizes: Mapping[str, Collection[int]]) -> None:
        """Take numbers and sizes for symbolic that are, by these names, where they come from."""
        for position, name in self.formulas.passed.items():
            self.numbers |= {
                place for place in self.formulas.numbers if place[0] == position and name + place[1] in names
            }
            for place in self.formulas.layouts:
                if place[0] == position and name + place[1] in sizes:
                    self.sizes.setdefault(place, set()).update(sizes[name + place[1]])

    def merge(self, other: SymbolicParts) -> None:
        """Add those of another capture that breaks at the same place."""
        for place, dims in other.sizes.items():
            self.sizes.setdefault(place, set()).update(dims)
        self.numbers |= other.numbers

    def note_given(self, passed: Mapping[int, str], given: Collection[str]) -> None:
        """Take what was only passed on for given at a break where it was."""
        self.given.update(position for position, name in passed.items() if name in given)

    def add_situation(self, situation: Situation, is_near: bool = False) -> None:
        """Note what may come, once."""
        known = self.near if is_near else self.situations
        if len(known) < _MOST_VALUES and situation not in known:
            known.append(situation)

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

    def expected_after(self, moved: Moved, is_near: bool = False) -> Iterator[Expected]:
        """What was symbolic in any capture, as it is in each situation."""
        for situation in self.near if is_near else self.situations:
            layouts: dict[str, Layout] = {}
            numbers: dict[str, int] = {}
            for position, way in self.sizes:
                shape, strides = situation.layouts.get((position, way), ((None,), ()))
                if None not in shape and None not in strides:
                    layouts.update((name + way, (shape, strides)) for name in moved.get(position, ()))
            for position, way in self.numbers:
                number = situation.numbers.get((position, way))
                if number is not None:
                    numbers.update((name + way, number) for name in moved.get(position, ()))
            if layouts or numbers:
                yield Expected(dict(self.sizes_after(moved)), layouts, numbers)

    def _add(self, place: Place, value: Any, nesting: int) -> bool:
        """Note what is symbolic in a value; whether it is a symbolic number itself."""
        position, way = place
        kind = type(value)
        formulas = self.formulas
        if kind in (int, torch.SymInt) and len(formulas.numbers) < _MOST_VALUES:
            formulas.numbers[place] = value
        if kind in (torch.SymInt, torch.SymFloat):
            is_number = not private_sizes.is_data_number(value)
            if is_number:
                self.numbers.add(place)
            return is_number
        if isinstance(value, torch.Tensor):
            shape = value.shape if value.layout is torch.strided else ()
            if (
                value.layout is torch.strided
                and len(formulas.layouts) < _MOST_VALUES
                and private_sizes.size_today(value.storage_offset()) == 0
            ):
                formulas.layouts[place] = tuple(shape), value.stride()
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
