"""Slices that tensors bound: ``x[start:]`` is ``x[start.item():]``, one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.versions import parse
from tests.differential import same


def _written(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[start:] = 1
    return x * 2


_PROGRAMS: dict[str, Callable[..., torch.Tensor]] = {
    "start": lambda x, start: x[start:] * 2,
    "stop": lambda x, start: x[:start] * 2,
    "both": lambda x, start: x[start : start + 2] * 2,
    "other dimension": lambda x, start: x[:, start:, None] * 2,
    "computed": lambda x, start: x[torch.stack([start, start * 0]).argmax() :] * 2,
    "written": _written,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_one_graph(name: str) -> None:
    if name == "written" and parse(torch.__version__) < (2, 13):
        pytest.skip("torch before 2.13 reads the number for a write to a slice: a graph break")
    program = _PROGRAMS[name]
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for start in (1, 2, -1):
        found: list[Any] = []
        for function in (program, compiled):
            x = torch.arange(12.0).view(4, 3).requires_grad_()
            result = function(x, torch.tensor(start))
            found.append((result, torch.autograd.grad(result.sum(), x)))
        same(*found)


def test_what_is_no_index_is_eagers_error() -> None:
    compiled = dovetail.compile(lambda x, start: x[start:], backend="aten")
    with pytest.raises(TypeError, match="only integer tensors"):
        compiled(torch.ones(3), torch.tensor(1.0))
