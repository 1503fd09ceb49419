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


def test_losses_that_are_added_up_without_detach() -> None:
    """The sum of an earlier call has no backward any more either; one of another origin has, and eager takes that call."""

    def make(state: dict[str, Any]) -> tuple[Callable[..., Any], Tensor]:
        weight = torch.tensor([0.5, 2.0], requires_grad=True)

        def step(x: Tensor) -> Tensor:
            weight.grad = None
            loss = (x * weight).exp().sum()
            loss.backward()
            state["total"] = state["total"] + loss
            return state["total"]

        return step, weight

    found = []
    for wrap in (lambda step: step, lambda step: dovetail.compile(step, backend="aten")):
        other, state = torch.ones((), requires_grad=True), {"total": 0}
        step, weight = make(state)
        step, rows = wrap(step), []
        for number in range(6):
            if number == 4:
                state["total"] = other * 2
            rows.append(step(torch.full((3, 2), float(number))))
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                rows[-1].backward()
            if number == 4:
                rows.append(torch.autograd.grad(rows[-1], other)[0])
        found.append([*(row.detach() for row in rows), weight.grad])
        if number_of := getattr(step, "entries", None):
            assert len(number_of) <= 4
    same(*found)
