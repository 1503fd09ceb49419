"""State that is carried from call to call with its history: a backward comes to the nodes that eager's would come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


def beside(x: Tensor, weight: Tensor, state: Tensor) -> Any:
    product = x * weight
    state.index_add_(0, torch.tensor([0, 2]), product[:2])
    return product.sin()


def two_results(x: Tensor, weight: Tensor, state: Tensor) -> Any:
    state.mul_(weight[0, 0])
    return (x * weight).cos(), (weight**2).sum()


def kept_in_a_view(x: Tensor, weight: Tensor, state: Tensor) -> Any:
    state[0] = weight[1] * 3
    return (x * weight).exp()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("function", [beside, two_results, kept_in_a_view])
def test_a_state_that_the_loss_does_not_depend_on(function: Callable[..., Any], order: int) -> None:
    """The compiled node leads to the state's history, which an earlier backward has freed; no gradient goes there."""
    compiled, found = dovetail.compile(function, backend="aten"), []
    for call in (function, compiled):
        torch.manual_seed(0)
        weight, state = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
        gradients = []
        for _ in range(3):
            results = call(torch.randn(3, 4), weight, state)
            loss = sum((value**2).sum() for value in (results if isinstance(results, tuple) else (results,)))
            if order == 2:
                (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
                loss = gradient.sin().sum()
            loss.backward()
            gradients.append(weight.grad.clone())
        found.append((gradients, state))
    # The second order multiplies in another order than eager.
    same(*found, exact=order == 1)


def test_a_state_that_the_loss_depends_on_is_freed() -> None:
    def function(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
        state.mul_(weight)
        return (x * state).sum()

    for call in (function, dovetail.compile(function, backend="aten")):
        weight, state = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4)
        call(torch.ones(3, 4), weight, state).backward()
        with pytest.raises(RuntimeError, match="second time"):
            call(torch.ones(3, 4), weight, state).backward()
