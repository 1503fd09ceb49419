"""What a derivative of the backward relies on: that the graph saves its leaves themselves, call after call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import HigherOrderGradientError


class Copying:
    """Runs graphs as they are; ``copies`` says for each of the values that a forward saves whether it is copied."""

    def __init__(self) -> None:
        self.copies: Callable[[int], bool] = lambda position: False

    def __call__(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: str, options: Any
    ) -> Callable[[Sequence[Any]], Any]:
        def run(inputs: Sequence[Any]) -> Any:
            results = list(graph(*inputs))
            if kind != "forward":
                return results
            leaves = [place for place, value in enumerate(results) if any(value is item for item in inputs)]
            for number, place in enumerate(leaves):
                if self.copies(number):
                    results[place] = results[place].clone()
            return results

        return run


def second_order(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a gradient's sum of squares."""
    gradients = torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)
    return list(torch.autograd.grad(sum((item**2).sum() for item in gradients), inputs))


def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).sin() * one


@pytest.mark.parametrize("from_call", [1, 2, 3])
def test_a_backend_that_copies_all_from_some_call_on(from_call: int) -> None:
    backend = Copying()
    compiled = dovetail.compile(product, backend=backend, fullgraph=True)
    inputs = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for call in range(1, 5):
        if call == from_call:
            backend.copies = lambda position: True
        assert all(map(torch.equal, second_order(compiled, inputs), second_order(product, inputs)))


def test_a_backend_that_copies_only_some() -> None:
    backend = Copying()
    compiled = dovetail.compile(product, backend=backend, fullgraph=True)
    inputs = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for _ in range(3):
        second_order(compiled, inputs)
    backend.copies = lambda position: position == 1
    with pytest.raises(HigherOrderGradientError, match="copied an input"):
        second_order(compiled, inputs)


@pytest.mark.parametrize("written", [0, 1])
def test_a_leaf_that_is_written_to_between(written: int) -> None:
    backend = Copying()
    compiled = dovetail.compile(product, backend=backend, fullgraph=True)
    inputs = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for call in range(4):
        if call == 2:
            backend.copies = lambda position: True
        result = compiled(*inputs).sum()
        with torch.no_grad():
            inputs[written].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(result, inputs, create_graph=True)
