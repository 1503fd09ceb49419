"""What the live values at a graph break will be at sizes that no call has had yet.

A part that was captured with symbols knows each number that it hands on as a formula over the sizes of its inputs. So it can
say what the part behind the break will be given at other sizes, without being captured again: a padding of 0 or 1, say, which
no symbol stands for there, and the lengths of all tensors that come with such a padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dovetail import torch_private_sizes as private_sizes
from dovetail.errors import CaptureError
from dovetail.frontend.exits import Situation
from dovetail.runtime.entry import Entry
from dovetail.trace.other_sides import resized
from dovetail.trace.shapes import NUMBER_SUFFIX

_SPECIAL = (0, 1)
# As for the other sides of comparisons: a size so many times smaller or greater is one that the program may never see.
_MOST_TIMES = 4
_MOST_TRIES = 64


class ExitFormulas:
    """What an entry hands on, computed from the tensors that it fetches."""

    def __init__(self, entry: Entry) -> None:
        capture = entry.compiled.joint.capture
        self._formulas: Situation = capture.symbolic.formulas
        self._bindings = capture.bindings
        self._shapes = entry.checker.guards.shapes
        self._expressions: dict[Any, int] = {}
        self._compute: Callable[[Sequence[torch.Tensor]], tuple[Any, ...]] | None = None
        self._formulas.map(self._note)
        if self._bindings is not None:
            self._compute = self._bindings.function(list(self._expressions))

    def at(self, tensors: Sequence[torch.Tensor]) -> Situation:
        """What the entry hands on for these tensors."""
        results = () if self._compute is None else self._compute(tensors)
        return self._formulas.map(lambda number: self._value(number, results))

    def special(self, tensors: Sequence[torch.Tensor]) -> Iterator[Situation]:
        """What is handed on where a number is 0 or 1 that is neither today, at sizes that the entry is for."""
        if self._bindings is None or self._shapes is None or self._compute is None:
            return
        places = {
            symbol: (index, dim)
            for symbol, (index, kind, dim) in self._bindings.symbols.items()
            if kind == "size" and not self._bindings.names[index].endswith(NUMBER_SUFFIX)
        }
        numbers = [number for number in self._formulas.numbers.values() if self._is_computed(number)]
        for expression in dict.fromkeys(map(private_sizes.first_expression, numbers)):
            position = self._expressions[expression]
            for target in _SPECIAL:
                for chosen in _candidates(private_sizes.symbols_of(expression), places, tensors):
                    others = resized(tensors, chosen)
                    if others is None or not self._shapes.holds(others):
                        continue
                    if self._compute(others)[position] == target:
                        yield self.at(others)
                        break

    def _note(self, number: Any) -> None:
        if private_sizes.is_symbolic(number) and not private_sizes.is_data_number(number):
            self._expressions.setdefault(private_sizes.first_expression(number), len(self._expressions))

    def _value(self, number: Any, results: Sequence[Any]) -> int | None:
        if type(number) is int:
            return number
        position = self._expressions.get(private_sizes.first_expression(number))
        return None if position is None or position >= len(results) else int(results[position])

    @staticmethod
    def _is_computed(number: Any) -> bool:
        """Whether a number is more than the size of an input: of these, 0 and 1 are as likely as any other."""
        return (
            private_sizes.is_symbolic(number)
            and not private_sizes.is_data_number(number)
            and not private_sizes.is_symbol(private_sizes.first_expression(number))
        )


def _candidates(
    symbols: Sequence[Any], places: Mapping[Any, tuple[int, int]], tensors: Sequence[torch.Tensor]
) -> Iterator[dict[int, dict[int, int]]]:
    """Other sizes to try, the nearest first: for all sizes at once that are the same today, then for one alone."""

    def size_of(symbol: Any) -> int:
        index, dim = places[symbol]
        return tensors[index].shape[dim]

    for symbol in symbols:
        if symbol not in places:
            continue
        now = size_of(symbol)
        near = [size for size in range(2, now * _MOST_TIMES + 1) if size != now and now <= size * _MOST_TIMES]
        near = sorted(near, key=lambda size: abs(size - now))[:_MOST_TRIES]
        alike = [item for item in places if size_of(item) == now]
        for group in (alike, [symbol]):
            for size in near:
                chosen: dict[int, dict[int, int]] = {}
                for item in group:
                    index, dim = places[item]
                    chosen.setdefault(index, {})[dim] = size
                yield chosen


def situations_of(entry: Entry, tensors: Sequence[torch.Tensor]) -> list[Situation]:
    """What an entry hands on for these tensors, and where numbers become 0 or 1; none where that cannot be computed."""
    symbolic = None if entry.resume_point is None else entry.compiled.joint.capture.symbolic
    if symbolic is None:
        return []
    try:
        formulas = ExitFormulas(entry)
        return [formulas.at(tensors), *formulas.special(tensors)]
    except (CaptureError, ArithmeticError):
        return []
