"""The sizes and effects of code, found by running it without values at several sizes.

Code that is kept whole in a graph may be any Python, so that no formula comes with its results. Here it runs on the meta device,
once with the sizes of the call and then with others. A size of a result that always was a certain multiple of one size of an
argument, with a certain distance from it, or always the same number, has that formula. Where there is none, there is no rule. A
rule is checked again whenever the code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.torch_private import numbers as private_numbers
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees

_STEPS = (1, 2, 3, 4, 5, 7, -1, -2)
_TIMES = (5, 20)
_LARGEST_TIMED = 64
_FEWEST_PROBES = 4


class NoRuleError(Exception):
    """No formula says what the sizes are, or the code does something else than compute."""


@dataclass(frozen=True)
class SizeFormula:
    """``factor * arguments[index].shape[dim] + offset``, or the number ``offset`` where there is no index.

    >>> SizeFormula(1, 2, 0, 1).of([torch.empty(3, 5)]), SizeFormula(4).of([])
    (11, 4)
    """

    offset: int
    factor: int = 0
    index: int | None = None
    dim: int = 0

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The size for these arguments."""
        return self.offset if self.index is None else self.factor * tensors[self.index].shape[self.dim] + self.offset


def formula(arguments: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> SizeFormula:
    """The formula for a size that was ``sizes`` for these arguments. Raises :class:`NoRuleError` where there is none."""
    if len(set(sizes)) == 1:
        return SizeFormula(sizes[0])
    places = [(index, dim) for index, tensor in enumerate(arguments[0]) for dim in range(tensor.dim())]
    found: list[SizeFormula] = []
    for index, dim in places:
        given = [item[index].shape[dim] for item in arguments]
        steps = {(after - given[0], size - sizes[0]) for after, size in zip(given, sizes, strict=True)}
        run, rise = next((step for step in sorted(steps) if step[0]), (0, 0))
        factor = rise // run if run else 0
        if factor and all(factor * (one - given[0]) == size - sizes[0] for one, size in zip(given, sizes, strict=True)):
            found.append(SizeFormula(sizes[0] - factor * given[0], factor, index, dim))
    if not found:
        raise NoRuleError
    # A size that is just that of an argument, before multiples of one and sums.
    return min(found, key=lambda item: (item.offset != 0, item.factor != 1))


def probe(
    tensors: Sequence[torch.Tensor], function: Callable[[list[torch.Tensor]], Any]
) -> tuple[list[list[torch.Tensor]], list[Any]]:
    """Arguments like those of a call, without values, for which the function did not raise, and its results; the first have the
    sizes of the call.

    Each symbol has a value of its own in each, so that no two sizes agree that need not. Where a function wants sizes to agree,
    symbols that agree in the call agree in all. Raises :class:`NoRuleError` where the function raised for the sizes of the call, or
    for nearly all others: it raises an error of its own at a call where sizes do not agree.
    """
    needs_gradient = [item.requires_grad and torch.is_grad_enabled() for item in tensors]
    symbols = private_numbers.values_of_symbols(
        [number for item in tensors for number in (*item.shape, *item.stride())]
    )
    for alike in (False, True):
        arguments: list[list[torch.Tensor]] = []
        results: list[Any] = []
        for values in _choices(tensors, symbols, alike):
            given = [_without_values(*pair, values) for pair in zip(tensors, needs_gradient, strict=True)]
            try:
                results.append(function(given))
            except NoRuleError:
                raise
            except Exception as error:
                if values is symbols:
                    raise NoRuleError from error
            else:
                arguments.append(given)
        if len(results) >= (_FEWEST_PROBES if symbols else 1):
            return arguments, results
    raise NoRuleError


def _choices(tensors: Sequence[torch.Tensor], symbols: Mapping[Any, int], alike: bool) -> Iterator[Mapping[Any, int]]:
    """Values of the symbols: those of the call, then others."""
    yield symbols
    # Far away, for sizes that are cut off at a bound; not where that would be many rounds of a loop.
    times = _TIMES if max(symbols.values(), default=0) <= _LARGEST_TIMED else ()
    places = list(dict.fromkeys(symbols.values() if alike else symbols))
    steps = [*((1, step) for step in _STEPS), *((factor, 1) for factor in times)]
    for number, (factor, step) in enumerate(steps if symbols else ()):
        changed = {}
        for symbol, value in symbols.items():
            position = places.index(value if alike else symbol)
            changed[symbol] = value * factor + step * (1 + position) + number % 2 * position
        sizes = [private_numbers.value_at(size, changed) for tensor in tensors for size in tensor.shape]
        if all(value > 0 for value in (*changed.values(), *sizes)):
            yield changed


def _without_values(tensor: torch.Tensor, needs_gradient: bool, values: Mapping[Any, int]) -> torch.Tensor:
    shape, strides = (
        [private_numbers.value_at(number, values) for number in part] for part in (tensor.shape, tensor.stride())
    )
    like = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
    # No leaf: a program may write to a tensor that requires a gradient.
    return like.requires_grad_(needs_gradient).clone()


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor lies in."""
    return private_tensors.storage_key(tensor.untyped_storage())


class Watch(private_tracing.TorchDispatchMode):  # type: ignore[misc]
    """Notes which memory is written to, on which devices, and whether an operator draws random numbers or asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.devices: set[str] = set()
        self.draws = False
        self.is_refused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`torch.utils._python_dispatch.TorchDispatchMode`."""
        kwargs = kwargs or {}
        refused = {torch.Tag.data_dependent_output, torch.Tag.inplace_view}
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        self.is_refused = self.is_refused or not refused.isdisjoint(func.tags)
        self.devices |= {item.device.type for item in _tensors((args, kwargs))}
        for position, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                self.written.update(map(storage_of, _tensors(value)))
        return func(*args, **kwargs)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in private_trees.tree_leaves(value) if isinstance(item, torch.Tensor)]


def are_plain(values: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are dense ones of one device that no transform looks after."""
    is_transformed = private_state.forward_ad_level() >= 0 or any(map(private_tensors.is_functorch_wrapped, values))
    is_dense = all(item.layout is torch.strided and not item.is_conj() and not item.is_neg() for item in values)
    devices = {item.device for item in values}
    return is_dense and not is_transformed and len(devices) == 1 and not any(map(private_tensors.is_wrapper, values))
