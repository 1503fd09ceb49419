"""Indices that are tensors without dimensions: ``x[start:]`` is ``x[start.item():]``, ``x[at]`` is ``x[at.item()]``, one graph."""

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


def _written_item(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[at] = 1
    return x * 2


_PROGRAMS: dict[str, Callable[..., torch.Tensor]] = {
    "start": lambda x, start: x[start:] * 2,
    "stop": lambda x, start: x[:start] * 2,
    "both": lambda x, start: x[start : start + 2] * 2,
    "other dimension": lambda x, start: x[:, start:, None] * 2,
    "computed": lambda x, start: x[torch.stack([start, start * 0]).argmax() :] * 2,
    "written": _written,
    "an item": lambda x, at: x[at] * 2,
    "a column": lambda x, at: x[:, at] * x[..., at, None].sum(),
    "an element": lambda x, at: x[at, at - 1] * 2,
    "other whole numbers": lambda x, at: x[at.to(torch.int8)] * x[at.int()],
    "an item of a constant": lambda x, at: x * torch.linspace(0, 1, 4)[at],
    "beside a list": lambda x, at: x[torch.tensor([0, 1]), at] * 2,
    "by number": lambda x, at: x[:, at.item()] * 2,
    "written item": _written_item,
    "under vmap": lambda x, at: torch.vmap(lambda row, one: row[one])(x, at.expand(4)),
    "a mask": lambda x, at: x[at.to(torch.uint8) * 0 + 1] * 2,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_one_graph(name: str) -> None:
    if name.startswith("written") and parse(torch.__version__) < (2, 13):
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


def test_an_item_beyond_the_end_is_eagers_error() -> None:
    compiled = dovetail.compile(lambda x, at: x[at] * 2, backend="aten")
    compiled(torch.ones(3), torch.tensor(1))
    with pytest.raises(IndexError, match="out of"):
        compiled(torch.ones(3), torch.tensor(3))


@pytest.mark.usefixtures("quiet")
def test_an_item_that_is_returned_is_a_view() -> None:
    compiled = dovetail.compile(lambda x, at: x[at], backend="aten")
    x = torch.arange(3.0)
    for at in (1, 0):
        compiled(x, torch.tensor(at)).add_(10)
    same(torch.tensor([10.0, 11.0, 2.0]), x)
