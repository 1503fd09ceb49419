"""Writes through views that ``expand`` has made: to the last bit, and where the memory holds infinity or large numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Tensor = torch.Tensor
VALUES = (1e8, float("inf"), 3.0, -1e8)

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda w: w.expand(2, 4)[1].copy_(torch.arange(4.0) / 3),
    "an element of many": lambda w: w[:1].expand(3)[1:2].fill_(0.3),
    "its own size": lambda w: w.expand(4).mul_(0.1),
    "broadcast": lambda w: torch.broadcast_tensors(w, torch.ones(4))[0].mul_(0.1),
    "diagonal": lambda w: w.expand(4, 4).diagonal().fill_(0.3),
    "detached": lambda w: w.expand(2, 4).detach()[0].mul_(0.1),
    "items": lambda w: w.expand(2, 4).__setitem__((0, slice(1, 3)), 0.1),
    "out": lambda w: torch.add(torch.ones(4), 0.3, out=w.expand(2, 4)[0]),
    "strided": lambda w: w.as_strided((2, 4), (0, 1))[0].mul_(0.3),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.filterwarnings("ignore")
def test_input_and_made_inside(write: str) -> None:
    def to_input(w: Tensor) -> Tensor:
        WRITES[write](w)
        return w * 1

    def inside(w: Tensor) -> tuple[Tensor, Tensor]:
        made = w * 1
        WRITES[write](made)
        return made, made * 2

    for function in (to_input, inside):
        compiled = dovetail.compile(function, backend="aten")
        for _ in range(2):
            expected, actual = torch.tensor(VALUES), torch.tensor(VALUES)
            same(function(expected), compiled(actual))
            same(expected, actual)
