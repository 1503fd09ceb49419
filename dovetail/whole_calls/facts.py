"""What a graph relies on of the results of a whole call: found by an example, or by a rule over sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import OutgrownError
from dovetail.whole_calls.handles import carried_by, is_handle, make_handle

Results = Sequence[tuple[Sequence[Any], torch.dtype] | torch.Tensor]
SizesRule = Callable[..., Results]
"""From the arguments, of which it reads sizes and types only, to the size and type of each result; or to a tensor whose strides the
result has as well. A result without strides of its own is contiguous.
"""


@dataclass(frozen=True)
class TensorFacts:
    """One result; without a ``stride`` it is contiguous."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...] | None
    dtype: torch.dtype
    device: torch.device
    is_handle: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorFacts:
        """The facts of a tensor."""
        if is_handle(tensor):
            return TensorFacts((), (), tensor.dtype, tensor.device, True)
        return TensorFacts(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """A tensor like the result, without values."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def has_layout_of(self, tensor: torch.Tensor) -> bool:
        """Whether a result lies in memory as the graph takes it to."""
        return tensor.is_contiguous() if self.stride is None else tensor.stride() == self.stride

    def describe(self) -> str:
        """The facts in an error."""
        return f"{tuple(self.shape)}, {'contiguous' if self.stride is None else self.stride}, {self.dtype}"


class Facts:
    """The results of one function. ``by_example``: another call may have others, which depend on its data."""

    by_example = False

    def of(self, tensors: Sequence[torch.Tensor]) -> Sequence[TensorFacts]:
        """The facts of all results for these arguments."""
        raise NotImplementedError

    def depends(self, results: Sequence[torch.Tensor]) -> list[bool]:
        """Which of the results require a gradient where an argument does."""
        raise NotImplementedError

    def own(self, name: str, facts: TensorFacts, result: torch.Tensor, taken: set[int]) -> torch.Tensor:
        """A result as the graph takes it to be, in memory of its own. Raises :class:`OutgrownError`."""
        has_layout = facts.has_layout_of(result) or result.numel() < 2
        if facts.is_handle != is_handle(result) or (
            not facts.is_handle
            and (
                tuple(result.shape) != tuple(facts.shape)
                or result.dtype != facts.dtype
                or not (has_layout or not self.by_example)
            )
        ):
            raise OutgrownError(
                f"{name} has returned a tensor of size {tuple(result.shape)}, strides {result.stride()} and type {result.dtype}; "
                f"the graph was compiled for {facts.describe()}",
                advice="keep this call out of the compiled function: its result's size depends on the data",
            )
        if facts.is_handle:
            return make_handle(carried_by(result).detach())
        found = result.detach().resolve_conj().resolve_neg()
        if not facts.has_layout_of(found) or found.untyped_storage()._cdata in taken:
            found = facts.empty().copy_(found)
        taken.add(found.untyped_storage()._cdata)
        return found


@dataclass(frozen=True)
class ExampleFacts(Facts):
    """Results that are always like those of one example call."""

    results: tuple[TensorFacts, ...]
    flags: tuple[bool, ...]
    by_example = True

    @staticmethod
    def found(results: Sequence[torch.Tensor]) -> ExampleFacts:
        """The facts of the results of an example call."""
        flags = [(carried_by(item) if is_handle(item) else item).requires_grad for item in results]
        return ExampleFacts(tuple(map(TensorFacts.of, results)), tuple(flags))

    def of(self, tensors: Sequence[torch.Tensor]) -> Sequence[TensorFacts]:
        """See the base class."""
        return self.results

    def depends(self, results: Sequence[torch.Tensor]) -> list[bool]:
        """See the base class."""
        return list(self.flags)


@dataclass(frozen=True)
class RuleFacts(Facts):
    """Results whose sizes follow from those of the arguments. All tensors are on one device.

    Results of floating point depend on the arguments that require a gradient.
    """

    rule: SizesRule

    def of(self, tensors: Sequence[torch.Tensor]) -> Sequence[TensorFacts]:
        """See the base class."""
        found = []
        for item in self.rule(*tensors):
            if isinstance(item, torch.Tensor):
                shape, dtype = tuple(item.shape), item.dtype
                stride = torch.empty_like(item, device="meta").stride()
            else:
                (shape, dtype), stride = (tuple(item[0]), item[1]), None
            found.append(TensorFacts(shape, stride, dtype, tensors[0].device))
        return found

    def depends(self, results: Sequence[torch.Tensor]) -> list[bool]:
        """See the base class."""
        return [item.is_floating_point() or item.is_complex() for item in results]
