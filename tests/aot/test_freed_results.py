"""Results that are computed from what a ``backward()`` inside has freed, as the sum of two losses that is logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import same

Tensor = torch.Tensor


def sum_of_losses(x: Tensor, weight: Tensor) -> Tensor:
    real, fake = (x * weight).exp().mean(), (x * weight).sin().mean()
    real.backward()
    fake.backward()
    return real + fake


def mean_of_it(x: Tensor, weight: Tensor) -> Tensor:
    found = (x * weight).exp()
    found.sum().backward()
    return found.view(-1).mean()


def with_something_else(x: Tensor, weight: Tensor) -> Tensor:
    loss = (x * weight).exp().sum()
    loss.backward()
    return loss + weight.sum()


def _run(function: Callable[..., Any]) -> tuple[Any, ...]:
    x, weight = torch.ones(3, 2), torch.tensor([0.5, 2.0], requires_grad=True)
    result = function(x, weight)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.backward()
    return result, weight.grad


@pytest.mark.parametrize("program", [sum_of_losses, mean_of_it])
def test_it_has_no_backward_any_more(program: Callable[..., Any]) -> None:
    same(_run(program), _run(dovetail.compile(program, backend="aten", fullgraph=True)))


def test_what_has_a_backward_in_part_is_refused() -> None:
    with pytest.raises(GraphBreakError, match="has freed, and from something else"):
        _run(dovetail.compile(with_something_else, backend="aten", fullgraph=True))
