"""Which sizes the results of a function have, found out by calling it without values at several sizes.

A region of a program that runs whole (:mod:`dovetail.rules.sizes.whole_regions`) may have any Python in it, so that no formula
comes with its results. Here the function is called on the meta device, once with the sizes of the call and then with others. A
size of a result that was always a certain multiple of one size of an argument, or always the same number, has that formula.
Where none is left, or no single one, there is no rule. What a rule says is checked again whenever the function runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.torch_private import sizes as private_sizes

_STEPS = (1, 2, 3, 4, 5, 7, -1, -2)
_TIMES = (5, 20)
_LARGEST_TIMED = 64
_FEWEST_PROBES = 4


@dataclass(frozen=True)
class SizeFormula:
    """``factor * arguments[index].shape[dim]``, or the number ``factor`` where there is no index.

    >>> SizeFormula(2, 0, 1).of([torch.empty(3, 5)]), SizeFormula(4).of([])
    (10, 4)
    """

    factor: int
    index: int | None = None
    dim: int = 0

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The size for these arguments."""
        return self.factor if self.index is None else self.factor * tensors[self.index].shape[self.dim]


class Probes:
    """Arguments like those of a call, on the meta device, at the sizes of the call and at others.

    Each symbol has a value of its own in each, so that no two sizes agree that need not.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], needs_gradient: Sequence[bool]) -> None:
        self._tensors = tensors
        self._needs_gradient = needs_gradient
        numbers = [number for item in tensors for number in (*item.shape, *item.stride())]
        self._symbols = private_sizes.values_of_symbols(numbers)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """The arguments at each choice of sizes; those of the call first."""
        today = self._symbols
        yield self._at(today)
        # Far away for what is held to a bound; not where that would be many rounds of a loop.
        times = _TIMES if max(today.values(), default=0) <= _LARGEST_TIMED else ()
        for number, (factor, step) in enumerate([*((1, step) for step in _STEPS), *((factor, 1) for factor in times)]):
            changed = {
                symbol: value * factor + step * (1 + position) + number % 2 * position
                for position, (symbol, value) in enumerate(today.items())
            }
            sizes = [private_sizes.value_at(size, changed) for tensor in self._tensors for size in tensor.shape]
            if all(value > 0 for value in (*changed.values(), *sizes)):
                yield self._at(changed)

    def _at(self, values: Mapping[Any, int]) -> list[torch.Tensor]:
        found = []
        for tensor, flag in zip(self._tensors, self._needs_gradient, strict=True):
            shape, strides = [
                [private_sizes.value_at(number, values) for number in part] for part in (tensor.shape, tensor.stride())
            ]
            like = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
            # No leaves: a program may write to what requires a gradient.
            found.append(like.requires_grad_(flag).clone())
        return found


class NoRuleError(Exception):
    """No formula says what the sizes are."""


def probe(probes: Probes, function: Callable[[list[torch.Tensor]], Any]) -> tuple[list[list[torch.Tensor]], list[Any]]:
    """The arguments for which the function did not raise, and what it returned; those of the call are the first.

    Raises :class:`NoRuleError` where it raised for these, or for nearly all others.
    """
    arguments: list[list[torch.Tensor]] = []
    results: list[Any] = []
    for position, given in enumerate(probes):
        try:
            found = function(given)
        except NoRuleError:
            raise
        except Exception as error:
            if position == 0:
                raise NoRuleError from error
            continue
        arguments.append(given)
        results.append(found)
    if len(results) < _FEWEST_PROBES:
        raise NoRuleError
    return arguments, results


def formula(arguments: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> SizeFormula:
    """The one formula for a size that was ``sizes`` for these arguments. Raises :class:`NoRuleError` where there is none."""
    if len(set(sizes)) == 1:
        return SizeFormula(sizes[0])
    places = [(index, dim) for index, tensor in enumerate(arguments[0]) for dim in range(tensor.dim())]
    for factor, (index, dim) in itertools.product((1, None), places):
        given = [item[index].shape[dim] for item in arguments]
        times = factor if factor is not None else sizes[0] // max(1, given[0])
        if all(times * number == size for number, size in zip(given, sizes, strict=True)):
            return SizeFormula(times, index, dim)
    raise NoRuleError
