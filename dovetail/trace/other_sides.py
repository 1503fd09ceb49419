"""The other sides of comparisons of sizes: sizes at which a program would have taken another branch.

A capture with symbolic sizes follows one side of every comparison, and guards on it. ``kv_length >= window`` has another side
that later calls may take, at the price of a compilation in the middle of training. Here sizes are looked for that lead
there: with these in place of the sizes of the call, the same call is captured a second time. What is found is only ever a
proposal: an entry captured at other sizes holds where its own guards say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import CaptureError, UserLocation
from dovetail.torch_private import recordings as private_recordings
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.shapes import NUMBER_SUFFIX, Bindings, RecordingShapeEnv

_STEPS = (2, 3, 1, 0)
# A size that is so many times smaller or greater than those of the call is one that the program may never see.
_MOST_TIMES = 4


@dataclass(frozen=True)
class OtherSide:
    """Sizes for which ``condition`` does not hold, by the names of the tensors and their dimensions."""

    sizes: Mapping[str, Mapping[int, int]]
    condition: str
    where: UserLocation | None

    def __str__(self) -> str:
        shown = [f"{name}.shape[{dim}] = {size}" for name, dims in self.sizes.items() for dim, size in dims.items()]
        return ", ".join(shown)


def stand_in(
    tensor: torch.Tensor,
    sizes: Mapping[int, int],
    device: torch.device | None = None,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """An empty tensor like another one, with other sizes and its strides in the same order, or those that are given.

    Raises :class:`CaptureError` where such a tensor cannot be made: one with gaps in its memory, say.

    >>> stand_in(torch.empty_strided((4, 3), (1, 4)), {0: 7}).stride()
    (1, 7)
    """
    if strides is not None and len(strides) != tensor.dim():
        raise CaptureError("a tensor with another number of dimensions is no stand-in")
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]))
    shape = [sizes.get(dim, size) for dim, size in enumerate(tensor.shape)]
    made, expected, step = [0] * tensor.dim(), 1, 1
    for dim in order if strides is None else ():
        if tensor.stride(dim) != expected and tensor.shape[dim] != 1:
            raise CaptureError("a tensor that is not dense has no stand-in of another size")
        made[dim] = step
        expected, step = expected * tensor.shape[dim], step * shape[dim]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.storage_offset():
        raise CaptureError("a part of another tensor, or one of another class, has no stand-in of another size")
    return torch.empty_strided(shape, strides or made, dtype=tensor.dtype, device=device or tensor.device)


class Proposals:
    """The other sides of what one capture has compared. ``tensors`` are the inputs of the call, in order. ``unrolls``: the
    rounds of loops are among it.
    """

    def __init__(
        self, environment: RecordingShapeEnv, bindings: Bindings, tensors: Sequence[torch.Tensor], unrolls: bool = False
    ) -> None:
        self._unrolls = unrolls
        self._bindings = bindings
        self._tensors = tensors
        self._recorded = [item for item in environment.recorded() if not private_sizes.is_truth(item.expression)]
        self._places = {
            symbol: (index, dim)
            for symbol, (index, kind, dim) in bindings.symbols.items()
            if kind == "size" and not bindings.names[index].endswith(NUMBER_SUFFIX)
        }

    def __iter__(self) -> Iterator[OtherSide]:
        if not self._places or not any(map(self._is_branch, self._recorded)):
            return
        values = _Values(self._bindings, [item.expression for item in self._recorded])
        relations = self._bindings.function([expression for _, _, _, expression in self._bindings.relations])
        for position, item in enumerate(self._recorded):
            if not self._is_branch(item):
                continue
            for sizes in self._candidates(item.expression):
                tensors = resized(self._tensors, sizes)
                if tensors is not None and self._leads_there(position, tensors, values, relations):
                    names = {self._bindings.names[index]: dims for index, dims in sizes.items()}
                    yield OtherSide(names, self._bindings.sentence(item.expression), item.location)
                    break

    def _is_branch(self, item: Any) -> bool:
        """Whether a comparison is one of the program's own with many sizes on both of its sides.

        One size that is a case of its own is none: it is as likely to be an error, or a loop that is unrolled for it. What
        an operator compares has an error on its other side, but for the layout of a slice that may be all of a tensor, for
        a padding up to a window, which is a single place for one length in so many, and for windows of which there is one.
        """
        expression = item.expression
        is_branch = private_sizes.divides_sizes(expression) or (
            self._unrolls and private_sizes.counts_steps(expression)
        )
        is_branch = is_branch and item.location is not None and not item.by_operator
        is_place = any(symbol in self._places for symbol in private_sizes.symbols_of(expression))
        by_layout = private_sizes.compares_bound(expression) or private_sizes.compares_rest_with_one(expression)
        by_layout = by_layout or (item.by_operator and private_sizes.compares_quotient_with_one(expression))
        # The call itself is the case of its own: an entry for one size, where the other side is for all others.
        by_layout = by_layout or ((item.by_operator or self._unrolls) and private_sizes.is_one(expression))
        return is_place and (is_branch or by_layout)

    def _leads_there(
        self, position: int, tensors: Sequence[torch.Tensor], values: Callable[..., Any], relations: Callable[..., Any]
    ) -> bool:
        """Whether all comparisons up to this one come out as they did, this one does not, and sizes that agree still do."""
        parts = zip(self._bindings.relations, relations(tensors), strict=True)
        if any(_part(tensors[index], kind, dim) != value for (index, kind, dim, _), value in parts):
            return False
        for number, (item, holds) in enumerate(zip(self._recorded, values(tensors), strict=True)):
            needed = number < position or (
                private_sizes.is_equality(item.expression) and len(private_sizes.symbols_of(item.expression)) > 1
            )
            if (number == position and holds) or (number != position and needed and not holds):
                return False
        return True

    def _candidates(self, expression: Any) -> Iterator[dict[int, dict[int, int]]]:
        """Other sizes to try: those near the numbers in the comparison, for all sizes at once that are the same today."""
        numbers = private_sizes.whole_numbers_of(expression)
        for symbol in private_sizes.symbols_of(expression):
            if symbol not in self._places:
                continue
            now = self._size(symbol)
            others = [self._size(item) for item in private_sizes.symbols_of(expression) if item in self._places]
            edges = sorted({now, *numbers, *others, *_quotients(numbers)}, key=lambda edge: abs(edge - now))
            alike = [item for item in self._places if self._size(item) == now]
            for group in (alike, [symbol]):
                for size in _around(edges):
                    if size != now and size >= 2 and now <= size * _MOST_TIMES and size <= now * _MOST_TIMES:
                        chosen: dict[int, dict[int, int]] = {}
                        for item in group:
                            index, dim = self._places[item]
                            chosen.setdefault(index, {})[dim] = size
                        yield chosen

    def _size(self, symbol: Any) -> int:
        index, dim = self._places[symbol]
        return self._tensors[index].shape[dim]


def resized(tensors: Sequence[torch.Tensor], sizes: Mapping[int, Mapping[int, int]]) -> list[torch.Tensor] | None:
    """The tensors, some with other sizes; None where one of these shares its memory, or cannot have another size."""
    memory = [private_recordings.storage_key(item.untyped_storage()) for item in tensors]
    found = list(tensors)
    for index, dims in sizes.items():
        if memory.count(memory[index]) > 1:
            return None
        try:
            found[index] = stand_in(found[index], dims, torch.device("meta"))
        except CaptureError:
            return None
    return found


class _Values:
    """The values of conditions for some tensors; None for one that cannot be computed: what a branch divides by may be zero on
    its other side.
    """

    def __init__(self, bindings: Bindings, conditions: Sequence[Any]) -> None:
        self._bindings = bindings
        self._conditions = conditions
        self._all = bindings.function(conditions)
        self._single: list[Callable[..., Any]] = []

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        try:
            found: Sequence[Any] = self._all(tensors)
            return found
        except ArithmeticError:
            self._single = self._single or [self._bindings.function([item]) for item in self._conditions]
            return [_value(function, tensors) for function in self._single]


def _value(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    try:
        return function(tensors)[0]
    except ArithmeticError:
        return None


def _part(tensor: torch.Tensor, kind: str, dim: int) -> int:
    if kind == "offset":
        return int(tensor.storage_offset())
    return tensor.stride(dim) if kind == "stride" else tensor.shape[dim]


def _quotients(numbers: Iterable[int]) -> Iterator[int]:
    """``16 * n != 112`` is about the size 7."""
    found = [number for number in numbers if number > 1]
    yield from (left // right for left in found for right in found if left > right)


def _around(edges: Sequence[int]) -> Iterator[int]:
    """Sizes near edges: a little way from each first, because a program may treat the edge itself as a case of its own."""
    for step in _STEPS:
        for edge in edges:
            yield edge - step
            if step:
                yield edge + step
