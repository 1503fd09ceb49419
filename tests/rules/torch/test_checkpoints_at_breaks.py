"""Checkpointed regions before a graph break: they read variables of the function when the backward computes them again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dovetail
from tests.differential import same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


def set_after_the_break(y: Tensor, w: Tensor) -> Tensor:
    m = w
    r = checkpoint(lambda t: (t * m).sin(), y, use_reentrant=False)
    torch._dynamo.graph_break()
    m = w * 5
    return r


def set_after_the_break_by_a_region_with_a_name(y: Tensor, w: Tensor) -> Tensor:
    m = w

    def region(t: Tensor) -> Tensor:
        return (t * m).sin()

    r = checkpoint(region, y, use_reentrant=True)
    torch._dynamo.graph_break()
    m = w * 5
    return r + m.sum()


def set_in_the_next_round(y: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros(3)
    for round_ in range(2):
        m = w * (round_ + 1)
        total = total + checkpoint(lambda t: (t * m).sin(), y, use_reentrant=False)  # noqa: B023
        torch._dynamo.graph_break()
    return total


def set_before_it_alone(y: Tensor, w: Tensor) -> Tensor:
    m = w * 2
    r = checkpoint(lambda t: (t * m).sin(), y, use_reentrant=False)
    torch._dynamo.graph_break()
    return r * 2


def of_a_function_that_has_returned(y: Tensor, w: Tensor) -> Tensor:
    def block(x: Tensor, flag: bool) -> Tensor:
        scale = w
        if flag:
            return checkpoint(lambda t: (t * scale).sin(), x, use_reentrant=False)
        scale = scale * 2
        return x * scale

    r = block(y, True)
    torch._dynamo.graph_break()
    return r * 2


REFUSED = (set_after_the_break, set_after_the_break_by_a_region_with_a_name, set_in_the_next_round)


@pytest.mark.parametrize("function", [*REFUSED, set_before_it_alone, of_a_function_that_has_returned])
def test_the_variable_is_read_as_in_eager(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    compiled = dovetail.compile(function, backend="aten")
    for _ in range(2):
        found = []
        for call in (function, compiled):
            y, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
            call(y, w).sum().backward()
            found.append(y.grad)
        same(*found)
    reasons = [str(event) for event in dovetail.events_of(compiled).events]
    assert any("a checkpointed region reads" in reason for reason in reasons) is (function in REFUSED)
