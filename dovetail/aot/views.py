"""Returned views: how each is made again, at every call, from the tensor that it is a view of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Bindings


class AutogradView:
    """Makes a view of a base again by the view operators that autograd recorded, so that its backward is eager's too.

    Sizes among the operators' arguments are computed from the inputs where they are symbolic.
    """

    def __init__(self, view: torch.Tensor, bindings: Bindings) -> None:
        self._replay = private_tensors.view_replay(view)
        self.plain = _plain_geometry(view, view._base)
        sizes: list[Any] = []

        def note(size: Any) -> Any:
            sizes.append(private_sizes.expression_of(size))
            return size

        with torch.no_grad():
            again = self._replay(view._base, note)
        # Writes to the view's own sizes (``t_``) are not always recorded.
        self.is_exact = _layout(again) == _layout(view)
        self._compute = None if all(type(size) is int for size in sizes) else bindings.function(sizes)

    def __call__(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The view, of another base."""
        if self._compute is None:
            return self._replay(base)
        sizes = iter(self._compute(inputs))
        return self._replay(base, lambda size: next(sizes))


class StridedView:
    """Makes a view of a base again by size, stride and offset, which follow from the inputs where they are symbolic.

    A tensor that autograd does not know as a view of the base is made from ``base.detach()``, or from ``base.data`` if it
    counts its own versions.
    """

    def __init__(self, view: torch.Tensor, base: torch.Tensor, bindings: Bindings) -> None:
        self.plain = _plain_geometry(view, base)
        self.same = _layout(view) == _layout(base)
        self.detached = view._base is not base and view.grad_fn is None
        self.counts_own_versions = self.detached and not private_tensors.share_version_counter(view, base)
        self.is_view = view._base is not None
        self._dims = view.dim()
        self._compute: Any = None
        if self.plain is None:
            *numbers, offset = _layout(view)[3:]
            self._compute = bindings.function([*numbers, offset - _layout(base)[-1]])

    def __call__(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The view, of another base."""
        if not self.detached:
            if self.same:
                return base.view_as(base) if torch.is_grad_enabled() else base.detach()
            return self._part(base, inputs)
        apart = base.data if self.counts_own_versions else base.detach()
        if not self.same:
            apart = self._part(apart, inputs)
        elif self.is_view:
            apart = apart.view_as(apart)
        return apart if self.is_view or apart._base is None else apart.detach()

    def _part(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.plain is not None:
            size, stride, offset = self.plain
        else:
            numbers = self._compute(inputs)
            size, stride, offset = numbers[: self._dims], numbers[self._dims : -1], numbers[-1]
        return base.as_strided(size, stride, base.storage_offset() + offset)


def whole_view(base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of a tensor, as a view."""
    return base.view_as(base)


def view_of_custom_function(base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of a tensor, as a view that may not be written to."""
    view = base.view_as(base)
    private_tensors.mark_as_view_of_custom_function(view)
    return view


def reads_other_bits(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view gives the memory of its base another meaning: another dtype, or conjugate or negative values.

    >>> reads_other_bits(torch.ones(2).view(torch.int32), torch.ones(2))
    True
    """
    return (view.dtype, view.is_conj(), view.is_neg()) != (base.dtype, base.is_conj(), base.is_neg())


def _plain_geometry(view: torch.Tensor, base: Any) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Size, stride and offset from the base's; None where it has symbols, or where strides alone do not make the view."""
    if private_sizes.has_symbols(view) or private_sizes.has_symbols(base) or reads_other_bits(view, base):
        return None
    return tuple(view.shape), view.stride(), int(_layout(view)[-1] - _layout(base)[-1])


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    # After a write, torch's wrapper of an input still has the offset from before.
    inner: Any = private_tracing.from_fun(value)
    numbers = map(private_sizes.expression_of, (*value.shape, *value.stride(), inner.storage_offset()))
    return (value.dtype, value.is_conj(), value.is_neg(), *numbers)
