"""Incoming gradients of a class with ``__torch_function__`` only, as points and fields with labels are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

CALLED: list[str] = []


class Labelled(torch.Tensor):
    """It notes which functions it is given to."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As the base class, with a note."""
        CALLED.append(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, args, kwargs or {})


class Plain(torch.Tensor):
    """A class without anything of its own."""


def mixed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).tanh()


def handed_on(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Its gradient is the incoming one, as an object."""
    return x + weight


@pytest.mark.parametrize("kind", [Labelled, Plain])
@pytest.mark.parametrize("program", [mixed, handed_on])
@pytest.mark.parametrize("order", [1, 2])
def test_gradients_are_those_of_plain_tensors(program: Any, kind: Any, order: int) -> None:
    def run(function: Any) -> list[Any]:
        x, weight = (torch.linspace(-1, 1, 9).reshape(3, 3).clone().requires_grad_() for _ in range(2))
        tangent = torch.ones(3, 3).as_subclass(kind)
        result = function(x, weight)
        CALLED.clear()
        found: list[Any] = [*torch.autograd.grad(result, [x, weight], tangent, create_graph=order == 2)]
        found += [[type(item) for item in found], [item is tangent for item in found], sorted(CALLED)]
        if order == 2 and program is mixed:
            found += torch.autograd.grad(found[0].square().sum(), [x, weight])
        return found

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for _ in range(3):
        same(run(program), run(compiled))
