"""Writes through windows of ``unfold`` leave the elements that are in no window as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from tests.differential import same

WINDOWS = [
    (0, 2, 3),
    (0, 3, 3),
    (0, 2, 2),
    (0, 3, 1),
    (-1, 2, 3),
    (1, 2, 4),
    (0, 7, 1),
    (0, 1, 2),
    (0, 5, 3),
    (0, 2, 5),
]


def _read(x: Tensor, *window: int) -> Any:
    y = x.unfold(*window)
    return y * 2, y, y.stride()


def _written(x: Tensor, *window: int) -> Any:
    base = x * 1
    base.unfold(*window).mul_(-1)
    return base


def _written_argument(x: Tensor, *window: int) -> Any:
    with torch.no_grad():
        x.unfold(*window).neg_()
    return x * 2


def _of_a_view(x: Tensor, *window: int) -> Any:
    base = x * 1
    base.transpose(0, 1).unfold(*window).add_(1)
    return base.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("program", [_read, _written, _written_argument, _of_a_view])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(8)
def test_windows(window: tuple[int, int, int], program: Callable[..., Any], grad: bool) -> None:
    def run(call: Callable[..., Any]) -> Any:
        x = torch.arange(56.0).reshape(7, 8).requires_grad_(grad)
        try:
            result = call(x, *window)
        except RuntimeError as error:
            # Windows that overlap cannot be written to.
            return str(error).split("\n", 1)[0]
        first = result[0] if isinstance(result, tuple) else result
        if first.requires_grad:
            first.square().sum().backward()
        return result, x, x.grad

    same(run(program), run(dovetail.compile(program, backend="aten")))
