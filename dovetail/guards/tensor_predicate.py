"""Predicates on tensors, and the facts of a tensor that guards compare: type, dtype, device, sizes, strides, dispatch keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dovetail.guards.predicate import Call, Predicate
from dovetail.guards.source import Source
from dovetail.torch_private import tensors as private_tensors

if TYPE_CHECKING:
    from dovetail.guards.writer import Writer


@dataclass(frozen=True)
class TensorMatch(Predicate):
    """The value is a tensor with the metadata recorded under ``index``; checked for all tensors at once in C++."""

    index: int

    def holds(self, value: Any) -> bool:
        raise TypeError("TensorMatch needs the recorded metadata")

    def failures(self, source: Source, call: Call) -> list[str]:
        return call.facts[self.index].differences(source.name, call.fetch(source))

    def describe(self, name: str) -> str:
        return f"{name} is a tensor like input {self.index}"

    def failure(self, name: str, value: Any) -> str:
        return f"the tensor `{name}` changed"


@dataclass(frozen=True)
class Leafness(Predicate):
    """Whether a tensor is a leaf of autograd's graph."""

    is_leaf: bool

    def holds(self, value: Any) -> bool:
        return bool(value.is_leaf) is self.is_leaf

    def describe(self, name: str) -> str:
        return f"{name} is {'a' if self.is_leaf else 'no'} leaf"

    def failure(self, name: str, value: Any) -> str:
        return f"`{name}.is_leaf` was {self.is_leaf}, is {not self.is_leaf}"

    def condition(self, writer: Writer, source: Source, variable: str) -> str:
        return f"{variable}.is_leaf is {self.is_leaf}"


@dataclass(frozen=True)
class TensorFacts:
    """The metadata of one tensor at capture, without the tensor. A size or stride of None is symbolic: any will do."""

    type: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    requires_grad: bool
    is_leaf: bool
    dispatch_keys: str

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has these facts."""
        try:
            now = TensorFacts.of(tensor)
        except RuntimeError:
            # A view that autograd refuses to record, because its base was written to in a way that it forbids.
            return False
        return replace(self, shape=now.shape, stride=now.stride) == now and all(
            then is None or then == value
            for then, value in zip((*self.shape, *self.stride), (*now.shape, *now.stride), strict=True)
        )

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorFacts:
        """Read the metadata of a dense tensor."""
        return TensorFacts(
            type(tensor),
            tensor.dtype,
            tensor.device,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.requires_grad,
            tensor.is_leaf,
            private_tensors.dispatch_keys(tensor),
        )

    def differences(self, name: str, value: Any) -> list[str]:
        """Sentences on the facts that differ now; leafness has a guard of its own."""
        kind = type(value)
        if kind is not self.type:
            return [f"type of `{name}` was {self.type.__qualname__}, is {kind.__qualname__}"]
        if value.layout is not torch.strided:
            return [f"`{name}.layout` was torch.strided, is {value.layout}"]
        found = []
        for attribute in ("dtype", "device", "requires_grad"):
            then, now = getattr(self, attribute), getattr(value, attribute)
            if then != now:
                found.append(f"`{name}.{attribute}` was {then}, is {now}")
        shape, stride = tuple(value.shape), tuple(value.stride())
        if len(shape) != len(self.shape):
            found.append(f"`{name}.dim()` was {len(self.shape)}, is {len(shape)}")
        else:
            sizes = zip(self.shape, shape)
            found += [
                f"`{name}.shape[{i}]` was {then}, is {now}"
                for i, (then, now) in enumerate(sizes)
                if then not in (None, now)
            ]
            steps = zip(self.stride, stride)
            if not found and any(then not in (None, now) for then, now in steps):
                found.append(f"`{name}.stride()` was {self.stride}, is {stride}")
        if not found and private_tensors.dispatch_keys(value) != self.dispatch_keys:
            found.append(
                f"the dispatch keys of `{name}` were {self.dispatch_keys}, are {private_tensors.dispatch_keys(value)}"
            )
        return found
