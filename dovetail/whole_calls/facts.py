"""Facts that a graph relies on about the results of a whole call: found by an example, or by a rule over sizes."""

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


@dataclass(frozen=True)
class Facts:
    """The results of one function: ``rule`` gives them for its arguments.

    ``flags``: which of them require a gradient where an argument does. Facts that were found by an example have flags, and another
    call may have other results, which depend on its data. Without flags these are the results of floating point.
    """

    rule: Callable[..., Sequence[TensorFacts]] = lambda *tensors: ()
    flags: tuple[bool, ...] | None = None

    @staticmethod
    def by_example(results: Sequence[torch.Tensor]) -> Facts:
        """Results that are always like those of one example call."""
        found = tuple(map(TensorFacts.of, results))
        flags = [(carried_by(item) if is_handle(item) else item).requires_grad for item in results]
        return Facts(lambda *tensors: found, tuple(flags))

    @staticmethod
    def by_sizes(rule: SizesRule) -> Facts:
        """Results whose sizes follow from those of the arguments. All tensors are on one device."""

        def facts(*tensors: torch.Tensor) -> list[TensorFacts]:
            found = []
            for item in rule(*tensors):
                if isinstance(item, torch.Tensor):
                    shape, dtype = tuple(item.shape), item.dtype
                    stride = torch.empty_like(item, device="meta").stride()
                else:
                    (shape, dtype), stride = (tuple(item[0]), item[1]), None
                found.append(TensorFacts(shape, stride, dtype, tensors[0].device))
            return found

        return Facts(facts)

    def depends(self, results: Sequence[torch.Tensor]) -> list[bool]:
        """The results that require a gradient where an argument does."""
        if self.flags is not None:
            return list(self.flags)
        return [item.is_floating_point() or item.is_complex() for item in results]

    def own(self, name: str, facts: TensorFacts, result: torch.Tensor, taken: set[int]) -> torch.Tensor:
        """A result as the graph takes it to be, in memory of its own. Raises :class:`OutgrownError`."""
        is_same = facts.is_handle == is_handle(result)
        if is_same and not facts.is_handle:
            has_layout = self.flags is None or facts.has_layout_of(result) or result.numel() < 2
            is_same = (tuple(result.shape), result.dtype) == (tuple(facts.shape), facts.dtype) and has_layout
        if not is_same:
            expected = f"{tuple(facts.shape)}, {'contiguous' if facts.stride is None else facts.stride}, {facts.dtype}"
            raise OutgrownError(
                f"{name} has returned a tensor of size {tuple(result.shape)}, strides {result.stride()} and type {result.dtype}; "
                f"the graph was compiled for {expected}",
                advice="keep this call out of the compiled function: its result's size depends on the data",
            )
        if facts.is_handle:
            return make_handle(carried_by(result).detach())
        found = result.detach().resolve_conj().resolve_neg()
        if not facts.has_layout_of(found) or found.untyped_storage()._cdata in taken:
            own = facts.empty()
            # Of elements that lie in one place (an argument handed through that was expanded), one is written.
            once = tuple(slice(0, 1) if step == 0 else slice(None) for step in own.stride())
            own[once].copy_(found[once])
            found = own
        taken.add(found.untyped_storage()._cdata)
        return found
