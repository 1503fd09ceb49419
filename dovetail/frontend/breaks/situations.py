"""What the live values at a graph break will be at sizes that no call has had yet.

A part that was captured with symbols knows each number that it hands on as a formula over the sizes of its inputs. So it can
say what the part behind the break will be given at other sizes, without being captured again: a padding of 0 or 1, say, which
no symbol stands for there, and the lengths of all tensors that come with such a padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.breaks.symbols import Expected, Situation
from dovetail.runtime.entry import Entry
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.other_sides import resized
from dovetail.trace.shapes import NUMBER_SUFFIX

# As for the other sides of comparisons: a size so many times smaller or greater is one that the program may never see.
_MOST_TIMES = 4
_MOST_TRIES = 32


class ExitFormulas:
    """What an entry hands on, computed from the tensors that it fetches."""

    def __init__(self, entry: Entry) -> None:
        capture = entry.compiled.joint.capture
        self._formulas: Situation = capture.symbolic.formulas
        self._bindings = capture.bindings
        self._expressions: dict[Any, int] = {}
        self._compute: Callable[[Sequence[torch.Tensor]], tuple[Any, ...]] | None = None
        self._formulas.map(self._note)
        if self._bindings is not None:
            self._compute = self._bindings.function(list(self._expressions))

    def at(self, tensors: Sequence[torch.Tensor]) -> Situation:
        """What the entry hands on for these tensors."""
        results = () if self._compute is None else self._compute(tensors)
        return self._formulas.map(lambda number: self._value(number, results))

    def _note(self, number: Any) -> None:
        if private_sizes.is_symbolic(number) and not private_sizes.is_data_number(number):
            self._expressions.setdefault(private_sizes.first_expression(number), len(self._expressions))

    def _value(self, number: Any, results: Sequence[Any]) -> int | None:
        if type(number) is int:
            return number
        position = self._expressions.get(private_sizes.first_expression(number))
        return None if position is None or position >= len(results) else int(results[position])


def sizes_near(entry: Entry, tensors: Sequence[torch.Tensor]) -> Iterator[Expected]:
    """Sizes of the inputs that a later call may have, the nearest first: all that are the same today change together."""
    bindings = entry.compiled.joint.capture.bindings
    groups: dict[int, dict[int, list[int]]] = {}
    for index, kind, dim in () if bindings is None else bindings.symbols.values():
        if kind == "size" and not bindings.names[index].endswith(NUMBER_SUFFIX):
            groups.setdefault(tensors[index].shape[dim], {}).setdefault(index, []).append(dim)
    for now, group in groups.items():
        near = [size for size in range(2, now * _MOST_TIMES + 1) if size != now and now <= size * _MOST_TIMES]
        for size in sorted(near, key=lambda size: abs(size - now))[:_MOST_TRIES]:
            others = resized(tensors, {index: dict.fromkeys(dims, size) for index, dims in group.items()})
            if others is not None:
                layouts = {
                    bindings.names[index]: (tuple(others[index].shape), others[index].stride()) for index in group
                }
                yield Expected(layouts=layouts)


def formulas_of(entry: Entry) -> ExitFormulas | None:
    """What an entry hands on at a graph break; None where it ends at none, or where that cannot be computed."""
    symbolic = None if entry.resume_point is None else entry.compiled.joint.capture.symbolic
    try:
        return None if symbolic is None else ExitFormulas(entry)
    except CaptureError:
        return None
