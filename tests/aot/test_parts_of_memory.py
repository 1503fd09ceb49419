"""Inputs that begin in the middle of their memory: what is made of them after a write lies where it does in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

Tensor = torch.Tensor


def detached(x: Tensor) -> Any:
    x.zero_()
    return x.detach()


def part_of_detached(x: Tensor) -> Any:
    x.add_(1)
    return x.detach()[1:, 1]


def unrecorded(x: Tensor) -> Any:
    x.add_(1)
    with torch.no_grad():
        return x.view(-1)


def from_before_and_after(x: Tensor) -> Any:
    before = x.detach()
    x.mul_(2)
    return before[1:], x.detach()[1:], before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("function", (detached, part_of_detached, unrecorded, from_before_and_after))
def test_views_made_after_a_write(function: Callable[[Tensor], Any], dynamic: bool) -> None:
    compiled = dovetail.compile(function, backend="aten", fullgraph=True, dynamic=dynamic)
    for first in (1, 2, 0):
        seen = []
        for run in (function, compiled):
            memory = torch.arange(18.0).reshape(6, 3)
            results = run(memory[first : first + 3])
            memory.add_(100)
            results = results if isinstance(results, tuple) else (results,)
            seen.append([(item.storage_offset(), item.stride(), item.tolist()) for item in results])
        assert seen[0] == seen[1]
