"""Branches on tensors that the program makes of its own constants: nothing that a call is given decides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import check_calls, leaf, same


def steps_of_a_solver(x: torch.Tensor, function: Any = torch.sin) -> torch.Tensor:
    times = torch.linspace(0.0, 1.0, 3)
    grows = times[1:] > times[:-1]
    assert grows.all() or (~grows).all(), "must be increasing or decreasing"
    if len(times) > 1 and times[0] > times[1]:
        times = -times
    grid, found, at = torch.arange(0.0, 1.01, 0.25), [x], 1
    for before, after in zip(grid[:-1], grid[1:], strict=True):
        x = x + (after - before) * function(x)
        while at < len(times) and after >= times[at]:
            found.append(x)
            at += 1
    return torch.stack(found)


def tolerance(x: torch.Tensor, bound: Any = 0.5) -> torch.Tensor:
    try:
        iter(bound)
    except TypeError:
        bound = [bound] * x.shape[0]
    return x * torch.tensor(bound)


def test_a_solver_is_one_graph() -> None:
    check_calls(steps_of_a_solver, [(leaf(3),), (leaf(3),)], entries=1, fullgraph=True)


@pytest.mark.parametrize(
    "made", [lambda: torch.eye(3) * 2, lambda: torch.tensor([[1.0, 2.0]]).t(), lambda: torch.full((2,), 3)]
)
def test_other_constants(made: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        table = made()
        if (table > 1).any() and not table.sum() < 0:
            x = x * table.sum()
        return x if table.min() == 0 else x + 1

    check_calls(function, [(leaf(3),), (leaf(3),)], entries=1, fullgraph=True)


def test_a_constant_that_was_written_to() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        flags = torch.zeros(3)
        flags[1] = 1
        if flags.sum() > 0:
            x = x + 1
        flags.add_(x.detach()[:3])
        return x + flags

    check_calls(function, [(leaf(3),), (leaf(3),)], entries=1, fullgraph=True)


@pytest.mark.parametrize(
    "made", [lambda x: torch.rand(2), lambda x: x.detach().sin(), lambda x: torch.zeros(2) + x[0].detach()]
)
def test_chance_and_inputs_still_decide_at_each_call(made: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if made(x)[0] > 0.5 else x - 1

    with pytest.raises(GraphBreakError, match="depends on the values"):
        dovetail.compile(function, backend="aten", fullgraph=True)(leaf(2))


def test_a_number_that_cannot_be_iterated_beside_numbers_of_data() -> None:
    def function(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return tolerance(x) * count.item()

    check_calls(function, [(leaf(3), torch.tensor(2.0)), (leaf(3), torch.tensor(3.0))], entries=1, fullgraph=True)


CALLS = [0]


@torch.library.custom_op("dovetail_constants::count", mutates_args=())
def count(x: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return x + CALLS[0]


@count.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x + 1 if count(torch.zeros(1)) > 2 else x - 1,
        lambda x: (x, count(torch.zeros(2)).tolist()),
        lambda x: x * int(count(torch.zeros((), dtype=torch.int64))),
    ],
    ids=["a branch", "a list", "a number"],
)
def test_an_operator_of_a_library_may_give_something_else_each_time(program: Any) -> None:
    found = []
    for call in (program, dovetail.compile(program, backend="aten")):
        CALLS[0] = 0
        found.append([call(torch.ones(2)) for _ in range(4)])
    same(*found)
