"""Branches that only raise stay in one graph, which checks that they are not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.reports.explanation import compiled_function
from tests.differential import same

VALUES = ([1.0, 2.0], [3.0, 4.0], [50.0, 2.0], [1.0, -7.0], [0.5, 1.5])


def compared(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    if limit is not None and x.max() >= limit:
        raise ValueError(f"too large: {x.max()}")
    x.add_(1)
    return (x * 2).sum()


def asserted(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    assert x.min() > -5, "too small"
    return x * 3


def handled(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    try:
        if (x > 10).any() or x.isnan().any():
            raise KeyError(1)
        noise = torch.rand(3)
    except KeyError:
        noise = torch.rand(2)
    return noise.sum() * x


def of_a_number(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    if int(x.max().long().item()) > 9:
        raise ValueError("too large")
    return x + 1


def of_a_truth(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    if not torch.all(x > -5).item():
        raise ValueError("too small")
    return x + 1


def nested(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    def check(value: torch.Tensor) -> None:
        if not (value > -5).all():
            message = "small" if limit else "less"
            raise ValueError(message)

    check(x)
    return x.exp()


def outcome(function: Callable[..., Any], values: list[float], requires_grad: bool) -> Any:
    """The result or the exception, the argument afterwards, its gradient and what the generator draws next."""
    leaf = torch.tensor(values, requires_grad=requires_grad)
    x = leaf * 1
    torch.manual_seed(0)
    try:
        result = function(x, 9.0)
    except (ValueError, KeyError, AssertionError) as error:
        # pytest adds lines to an assertion's own message.
        return type(error).__name__, str(error).splitlines()[0], x.detach(), torch.rand(1)
    if requires_grad:
        result.sum().backward()
    return result.detach(), x.detach(), leaf.grad, torch.rand(1)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "program", [compared, asserted, handled, of_a_number, of_a_truth, nested], ids=lambda program: program.__name__
)
def test_one_graph(program: Callable[..., Any], requires_grad: bool) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for values in VALUES:
        same(outcome(program, values, requires_grad), outcome(compiled, values, requires_grad), str(values))
    (entry,) = compiled_function(compiled).entries
    assert entry.run is not None and entry.can_rerun_eagerly and entry.random_devices == ()


@pytest.mark.parametrize("program", [of_a_number, of_a_truth, compared], ids=lambda program: program.__name__)
@pytest.mark.sampled(3)
def test_the_check_is_in_the_graph_of_the_default_backend(program: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, fullgraph=True)
    for values in VALUES:
        same(outcome(program, values, True), outcome(compiled, values, True), str(values))
    assert len(compiled_function(compiled).entries) == 1


def test_a_branch_with_two_ways_is_still_refused() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        raise_later = x * 3
        if x.sum() < -10:
            return raise_later
        raise ValueError("between")

    with pytest.raises(dovetail.errors.GraphBreakError, match="a branch depends on the values of a tensor"):
        dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(3))


def test_a_loop_that_may_raise_goes_on_in_eager_where_it_does() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for row in x:
            if row.sum() > 10:
                raise ValueError(f"row {len(found)}")
            found.append(row * 2)
        return found

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    same(program(torch.ones(3, 2)), compiled(torch.ones(3, 2)))
    with pytest.raises(ValueError, match="row 1"):
        compiled(torch.tensor([[1.0, 2.0], [9.0, 9.0], [0.0, 0.0]]))
    assert len(compiled_function(compiled).entries) == 1


def test_the_derivative_of_any_order() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.min() < 0:
            raise ValueError("negative")
        return (x**3).sum()

    results = []
    for function in (program, dovetail.compile(program, backend="aten", fullgraph=True)):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        (first,) = torch.autograd.grad(function(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        results.append((first.detach(), second))
    same(*results)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_assumed_of_data_is_checked_in_the_forward(requires_grad: bool) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.nonzero().shape[0] <= 3)
        return x + 1

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    same(torch.tensor([2.0, 1.0]), compiled(torch.tensor([1.0, 0.0], requires_grad=requires_grad)).detach())
    compiled(torch.tensor([1.0, 0.0, 0.0, 0.0, 5.0], requires_grad=requires_grad))
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        compiled(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=requires_grad))
