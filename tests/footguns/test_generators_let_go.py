"""Generators that nobody refers to any more: Python runs their ``finally`` at once, in front of what comes next."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail

events: list[str] = []


def talking(number: int) -> Iterator[int]:
    try:
        while True:
            try:
                yield number
            except ValueError:
                events.append("thrown")
    finally:
        events.append("closed")


def deleted(x: torch.Tensor) -> torch.Tensor:
    generator = talking(1)
    next(generator)
    print("a graph break")
    del generator
    events.append("after")
    return x + 1


def bound_again(x: torch.Tensor) -> torch.Tensor:
    generator: Any = talking(1)
    next(generator)
    print("a graph break")
    x = x + 1
    generator = None
    events.append("after")
    print("another one")
    events.append("at the end")
    return x * 2


def loop_left(x: torch.Tensor) -> torch.Tensor:
    for number in talking(2):
        print("a graph break")
        if number:
            break
    events.append("after")
    return x + 1


def thrown_into(x: torch.Tensor) -> torch.Tensor:
    generator: Any = talking(1)
    next(generator)
    print("a graph break")
    generator.throw(ValueError("a"))
    return x + 1


def held_by_a_list(x: torch.Tensor) -> torch.Tensor:
    held = [talking(3)]
    next(held[0])
    print("a graph break")
    held.clear()
    events.append("after")
    return x + 1


@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
@pytest.mark.parametrize("function", [deleted, bound_again, loop_left, thrown_into, held_by_a_list])
def test_cleaning_up_is_in_its_place(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiled = dovetail.compile(function, backend="aten")
    gc.disable()
    try:
        for _ in range(3):
            found: list[list[str]] = []
            for run in (compiled, function):
                events.clear()
                result = run(torch.ones(2))
                found.append([*events, str(result)])
            assert found[0] == found[1] and "closed" in found[0]
    finally:
        gc.enable()
