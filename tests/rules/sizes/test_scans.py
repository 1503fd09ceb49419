"""``associative_scan`` along a symbolic size: the numbers of torch's own algorithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan

import dovetail
from tests.differential import check_calls, leaf, same

LENGTHS = (3, 5)


def recurrence(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def compare(function: Any, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> None:
    """Values and gradients of all calls."""
    calls = [(leaf(2 + position, length, 3), leaf(2 + position, length, 3)) for position, length in enumerate(lengths)]
    check_calls(function, calls, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("reverse", "dim"), [(False, 1), (True, -2)])
def test_a_scan_at_each_length(reverse: bool, dim: int) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> Any:
        return associative_scan(recurrence, (a.sigmoid(), b * 2), dim, reverse=reverse, combine_mode="generic")

    compare(program)


@pytest.mark.slow
def test_a_scan_over_a_dictionary_by_a_function_of_the_program() -> None:
    factor = 0.5

    def program(a: torch.Tensor, b: torch.Tensor) -> Any:
        bound = len(b.shape)

        def combine(left: Any, right: Any) -> Any:
            return {"sum": left["sum"] + right["sum"] * factor, "top": torch.maximum(left["top"], right["top"]) / bound}

        found = associative_scan(combine, {"sum": a * 1, "top": b * 1}, dim=1, combine_mode="generic")
        return [found["sum"], found["top"]]

    compare(program)


def test_a_changed_number_in_the_combining_function_is_another_graph() -> None:
    settings = {"factor": 2.0}

    def program(a: torch.Tensor) -> Any:
        def combine(left: Any, right: Any) -> Any:
            return left + right * settings["factor"]

        return associative_scan(combine, a * 1, dim=0, combine_mode="generic")

    compiled = dovetail.compile(program, backend="aten")
    for length, factor in ((4, 2.0), (5, 2.0), (5, 3.0)):
        settings["factor"] = factor
        x = torch.randn(length, 2)
        same(program(x), compiled(x))


@pytest.mark.slow
def test_a_combining_function_that_reads_a_tensor_of_its_own() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> Any:
        weight = b.mean()

        def combine(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left * weight + right

        return [associative_scan(combine, a * 1, dim=1, combine_mode="generic")]

    compare(program, (4, 5))


def test_a_combining_function_that_counts_its_calls() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> Any:
        calls: list[int] = []

        def combine(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return left + right

        return [associative_scan(combine, a * 1, dim=1, combine_mode="generic") * len(calls), b * 2]

    compare(program, (4, 5))


COUNTED: list[int] = []


@pytest.mark.slow
def test_a_combining_function_that_writes_outside() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> Any:
        def combine(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            COUNTED.append(1)
            return left + right

        return [associative_scan(combine, a * 1, dim=1, combine_mode="generic"), b * 2]

    compiled = dovetail.compile(program, backend="aten")
    for length in (4, 5, 6):
        a, b = torch.randn(2, length), torch.randn(2)
        counts = []
        for function in (program, compiled):
            COUNTED.clear()
            counts.append((function(a, b), len(COUNTED)))
        same(*counts)


@pytest.mark.slow
def test_a_second_derivative_through_a_scan() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = associative_scan(recurrence, (a.sigmoid(), b), 1, combine_mode="generic")[1]
        gradients = torch.autograd.grad(found.square().sum(), (a, b), create_graph=True)
        return sum((item.square().sum() for item in gradients), torch.zeros(()))

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for length in LENGTHS:
        given = [torch.randn(2, length, 3) for _ in range(2)]
        found = []
        for function in (program, compiled):
            leaves = [item.clone().requires_grad_() for item in given]
            value = function(*leaves)
            value.backward()
            found.append((value, [leaf.grad for leaf in leaves]))
        same(*found, exact=False)
