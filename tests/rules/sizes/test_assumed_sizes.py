"""Sizes that the data decides: torch asks whether they are 0 or 1, the graph assumes that they are not, and checks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.versions import parse
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor
#: How many rows are chosen, call by call: none and one are what the graph was not captured for.
CHOSEN = (5, 3, 0, 1, 8, 2, 1, 0)

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda rows: rows.cumsum(0),
    "std": lambda rows: rows.std(0),
    "var": lambda rows: rows.var(),
    "batch_norm": lambda rows: F.batch_norm(rows, None, None, training=True),
    "attention": lambda rows: F.scaled_dot_product_attention(rows[None], rows[None], rows[None]),
    "logsumexp": lambda rows: rows.logsumexp(0),
    "logcumsumexp": lambda rows: rows.logcumsumexp(0),
    "cdist": lambda rows: torch.cdist(rows, rows),
    "prod": lambda rows: rows.prod(0),
    "roll": lambda rows: rows.roll(1, 0),
    "diff": lambda rows: rows.diff(dim=0),
    "outer": lambda rows: torch.outer(rows[:, 0], rows[:, 1]),
    "dropout": lambda rows: F.dropout(rows, 0.5),
    "interpolate": lambda rows: F.interpolate(rows[:, None], scale_factor=2),
    "cummax": lambda rows: rows.cummax(0)[0],
    "einsum": lambda rows: torch.einsum("nd,md->nm", rows, rows).sum(0),
}


def rows_of(seed: int, count: int) -> Tensor:
    torch.manual_seed(seed)
    values = torch.randn(8, 4)
    values[:, 0] = values[:, 0].abs() * torch.where(torch.arange(8) < count, 1.0, -1.0)
    return values.requires_grad_()


def outcome(function: Callable[[Tensor], Tensor], seed: int, count: int) -> Any:
    """The result with its gradient, or the error of either."""
    x = rows_of(seed, count)
    torch.manual_seed(seed)
    try:
        result = function(x)
        return result, torch.autograd.grad((result**2).sum(), x), torch.rand(1)
    except (RuntimeError, ValueError, IndexError) as error:
        return type(error), str(error)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPERATORS)
def test_one_graph_and_eager_for_what_it_does_not_fit(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        return OPERATORS[name](x[x[:, 0] > 0] * 2)

    # A product of matrices in batches asks for plain sizes before torch 2.13: a graph break.
    whole = name != "attention" or parse(torch.__version__) >= (2, 13)
    compiled = dovetail.compile(function, backend="aten", fullgraph=whole)
    for seed, count in enumerate(CHOSEN):
        same(outcome(function, seed, count), outcome(compiled, seed, count))
    assert captures(compiled) <= 2 or not whole


@pytest.mark.parametrize("count", [0, 1])
def test_the_first_call_may_be_the_rare_one(count: int) -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x[x[:, 0] > 0], 0.5).cumsum(0)

    compiled = dovetail.compile(function, backend="aten")
    for seed, chosen in enumerate((count, 5, count)):
        same(outcome(function, seed, chosen), outcome(compiled, seed, chosen))


def test_a_branch_of_the_program_is_no_assumption() -> None:
    def function(x: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        return rows.sum() if rows.shape[0] > 1 else x.mean() * 3

    compiled = dovetail.compile(function, backend="aten")
    for seed, count in enumerate(CHOSEN):
        same(outcome(function, seed, count), outcome(compiled, seed, count))


def test_writes_are_made_once() -> None:
    """A call that the graph does not fit is eager's, and the graph has written nothing before it says so."""

    def function(x: Tensor, seen: Tensor, log: list[int]) -> Tensor:
        seen += 1
        rows = F.dropout(x[x[:, 0] > 0], 0.5)
        log.append(1)
        seen[:2] *= 2
        return rows.cumsum(0).sum() + seen.sum()

    compiled = dovetail.compile(function, backend="aten")
    states = [(torch.zeros(4), []), (torch.zeros(4), [])]
    for seed, count in enumerate(CHOSEN):
        found = []
        for call, (seen, log) in zip((function, compiled), states, strict=True):
            torch.manual_seed(seed)
            found.append((call(rows_of(seed, count), seen, log), seen.clone(), list(log), torch.rand(1)))
        same(*found)


def asked_by_length(x: Tensor) -> Tensor:
    rows = x[x[:, 0] > 0]
    if len(rows) > 0:
        return rows.mean() + x.square().sum()
    return x.sum()


def asked_by_count(x: Tensor) -> Tensor:
    if (x[:, 0] > 0).nonzero().numel() == 0:
        return x.sum() * 0
    return x[x[:, 0] > 0].square().sum()


def asked_by_number(x: Tensor) -> Tensor:
    if count := x[x[:, 0] > 0].shape[0]:
        x = x / count
    return x.square().sum()


def asked_in_a_loop(x: Tensor) -> Tensor:
    found = []
    for part in x.split(4):
        rows = part[part[:, 0] > 0]
        if not rows.numel():
            continue
        found.append(rows.norm())
    return torch.stack([x.sum(), *found]).sum()


@pytest.mark.parametrize("function", [asked_by_length, asked_by_count, asked_by_number, asked_in_a_loop])
@pytest.mark.parametrize("options", [{}, {"fullgraph": True}], ids=["breaks", "fullgraph"])
def test_a_branch_on_whether_something_is_left_is_no_break(function: Callable[[Tensor], Tensor], options: Any) -> None:
    compiled = dovetail.compile(function, backend="aten", **options)
    for seed, count in enumerate(CHOSEN):
        same(outcome(compiled, seed, count), outcome(function, seed, count))
    assert len(compiled.entries) == 1 and dovetail.events_of(compiled).count("graph break") == 0


def test_a_branch_that_is_often_taken_otherwise_breaks_the_graph() -> None:
    def function(x: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        noise = torch.rand(())
        return (rows.mean() if len(rows) else noise) + x.square().sum()

    compiled = dovetail.compile(function, backend="aten")
    for seed, count in enumerate((3, 0) * 12):
        same(outcome(compiled, seed, count), outcome(function, seed, count))
    assert dovetail.events_of(compiled).count("graph break") == 1


def test_a_loop_until_nothing_is_left_is_not_unrolled() -> None:
    def function(x: Tensor) -> Tensor:
        left, total = x[x[:, 0] > 0], x.sum()
        while len(left) > 0:
            total, left = total * 0.5 + left[0].sum(), left[1:]
            if left.shape[0] == 0:
                total = total + 1
        return total

    compiled = dovetail.compile(function, backend="aten")
    for seed, count in enumerate(CHOSEN):
        same(outcome(compiled, seed, count), outcome(function, seed, count))
    assert dovetail.events_of(compiled).count("graph break") > 0


def test_a_graph_that_passes_have_edited_assumes_nothing_of_a_branch() -> None:
    compiled = dovetail.compile(asked_by_length, backend="aten", passes=[lambda joint: joint])
    for seed, count in enumerate(CHOSEN):
        same(outcome(compiled, seed, count), outcome(asked_by_length, seed, count))
    assert dovetail.events_of(compiled).count("graph break") > 0
