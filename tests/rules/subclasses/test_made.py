"""Objects of tensor subclasses that a compiled function makes of its own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import same


class Labelled(torch.Tensor):
    labels: list[str]

    @staticmethod
    def __new__(cls, x: torch.Tensor, labels: list[str]) -> Any:
        return super().__new__(cls, x)

    def __init__(self, x: torch.Tensor, labels: list[str]) -> None:
        self.labels = labels


def by_new(x: torch.Tensor) -> Any:
    return Labelled(x, ["u", "v"])


def by_make_subclass(x: torch.Tensor) -> Any:
    made = torch.Tensor._make_subclass(Labelled, x)
    made.labels = ["u", "v"]
    return made


def by_as_subclass(x: torch.Tensor) -> Any:
    made = x.as_subclass(Labelled)
    made.labels = ["u", "v"]
    return made


@pytest.mark.parametrize("make", [by_new, by_make_subclass, by_as_subclass])
def test_an_object_of_a_subclass_is_made_in_the_graph(make: Callable[[torch.Tensor], Any]) -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)

    def function(x: torch.Tensor) -> Any:
        made = make(x.detach() * 2).requires_grad_()
        y = (made * weight).sin().sum()
        (slope,) = torch.autograd.grad(y, made, create_graph=True)
        loss = slope.square().sum().as_subclass(torch.Tensor)
        return loss * len(made.labels), isinstance(slope, Labelled), made.labels.index("v")

    def run(function: Callable[[torch.Tensor], Any]) -> list[Any]:
        weight.grad = None
        loss, *others = function(torch.ones(3, 2))
        loss.backward()
        return [loss, *others, weight.grad]

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for _ in range(2):
        same(run(function), run(compiled))


def test_an_object_of_a_class_with_a_dispatch_of_its_own_ends_the_graph() -> None:
    class Dispatching(torch.Tensor):
        __torch_dispatch__ = torch.Tensor.__torch_function__

    with pytest.raises(GraphBreakError, match="an object of the tensor subclass Dispatching is made"):
        dovetail.compile(lambda x: x.as_subclass(Dispatching), backend="aten", fullgraph=True)(torch.ones(3, 2))


def test_as_subclass_of_a_plain_tensor_shares_its_memory() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x * 2
        return (
            y.as_subclass(torch.Tensor),
            y,
            torch.Tensor.as_subclass(x, torch.Tensor),
            torch.Tensor.__new__(torch.Tensor, 2),
        )

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for function in (function, compiled):
        x = torch.ones(3, requires_grad=True)
        again, y, other, _ = function(x)
        assert again.data_ptr() == y.data_ptr() and other.data_ptr() == x.data_ptr()
        (again.sum() * 2 + other.sum()).backward()
        assert torch.equal(x.grad, torch.full((3,), 5.0))
