"""A truth value made of a number that changes from call to call (``training=epoch % 2 == 0``), as a flag of torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import captures, check_calls, randn


def reduced(x: torch.Tensor, number: int) -> Any:
    return x.sum(1, keepdim=number % 2 == 0), x.sort(dim=1, descending=number > 2).values


def normalised(x: torch.Tensor, number: int) -> Any:
    mean, variance = torch.zeros(5), torch.ones(5)
    y = torch.nn.functional.batch_norm(x, mean, variance, training=number % 2 == 0)
    return torch.nn.functional.dropout(y, 0.5, number % 2 == 0), mean


def recorded_sometimes(x: torch.Tensor, number: int) -> Any:
    with torch.set_grad_enabled(number % 2 == 0):
        y = x * 2
    return y, y.requires_grad


def autocast_sometimes(x: torch.Tensor, number: int) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 0):
        return x @ x.t()


def leaf_sometimes(x: torch.Tensor, number: int) -> Any:
    inside = x.detach().requires_grad_(number % 2 == 0)
    other = x.detach().clone()
    other.requires_grad = number % 2 == 0
    y = inside.square() + other
    return torch.autograd.grad(y.sum(), inside)[0] if number % 2 == 0 else y


def backward_options(x: torch.Tensor, number: int) -> Any:
    leaf = x.detach().clone().requires_grad_()
    y = leaf.pow(3).sum()
    (slope,) = torch.autograd.grad(y, leaf, create_graph=number % 2 == 0)
    if number % 2 == 0:
        y = y + slope.square().sum()
        y.backward(retain_graph=number % 2 == 0)
    return leaf.grad, slope.detach(), slope.requires_grad


def made_of_truths(x: torch.Tensor, number: int) -> Any:
    late = number > 2
    return torch.tensor(late), torch.tensor([late, number > 3]), torch.full((2,), late), x * late, torch.zeros(2) + late


PROGRAMS = [
    reduced,
    normalised,
    recorded_sometimes,
    autocast_sometimes,
    leaf_sometimes,
    backward_options,
    made_of_truths,
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_truth_value_is_a_flag(program: Callable[..., Any]) -> None:
    """One graph for each answer, and no more however often the number changes."""
    compiled = check_calls(program, [(randn(4, 5), number) for number in range(9)])
    assert captures(compiled) <= 6
    assert not dovetail.events_of(compiled).count("static shapes")


def test_a_truth_value_of_data_is_no_flag() -> None:
    """What depends on a tensor's data stays in the graph where an operator takes it, and breaks the graph where none does."""

    def program(x: torch.Tensor) -> Any:
        count = int((x > 0).sum())
        return torch.tensor(count > 3), x.sum(1, keepdim=count > 3)

    check_calls(program, [(x,) for x in (torch.ones(2, 3), -torch.ones(2, 3), torch.ones(2, 3))], fullgraph=False)
