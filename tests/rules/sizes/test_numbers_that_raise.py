"""Arithmetic on a number that changes: where it raises, the graph is for that number alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import dovetail

PROGRAMS: dict[str, Callable[[float], float]] = {
    "quotient": lambda n: 1 / (n - 2),
    "whole quotient": lambda n: 5 // (n - 2),
    "rest": lambda n: (n - 3) % (n - 2),
    "power": lambda n: (n - 2) ** -1,
    "root": lambda n: math.sqrt(n - 2),
    "logarithm": lambda n: math.log(n - 2),
}


@pytest.mark.parametrize("numbers", [(1, 2, 3, 1, 4), (3, 4, 2, 5, 2), (3.0, 4.0, 2.0, 5.0)])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sampled(2)
def test_a_number_that_raises(name: str, numbers: tuple[float, ...]) -> None:
    state, compute = {"n": numbers[0]}, PROGRAMS[name]

    def function(x: torch.Tensor) -> torch.Tensor:
        scaled = x * state["n"]
        try:
            added = compute(state["n"])
        except (ZeroDivisionError, ValueError):
            return scaled * 7
        return scaled * 2 + added

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    x = torch.arange(4.0)
    for number in numbers:
        state["n"] = number
        assert torch.equal(compiled(x), function(x)), number


def test_a_size_that_divides() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + 12 // (y.shape[0] - 4) if y.shape[0] > 4 else x

    compiled = dovetail.compile(function, backend="aten", fullgraph=True, dynamic=True)
    x = torch.arange(4.0)
    for size in (5, 6, 7, 9):
        y = torch.ones(size)
        assert torch.equal(compiled(x, y), function(x, y)), size
    assert dovetail.events_of(compiled).count("capture") == 1
