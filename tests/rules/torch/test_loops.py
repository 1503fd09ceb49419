"""``map``, ``scan`` and ``while_loop`` of torch break the graph: torch compiles the functions that they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import dovetail
from dovetail.errors import GraphBreakError

WEIGHT = torch.tensor([[0.5, -0.25], [0.75, 0.125]], requires_grad=True)
ZERO = torch.tensor(0)


def a_map(x: torch.Tensor) -> Any:
    return mapped(lambda row: (row @ WEIGHT).sin(), x * 2)


def a_scan(x: torch.Tensor) -> Any:
    return scan(lambda state, row: (state + row, state * row), torch.ones(2), x * 2)[1]


def a_while_loop(x: torch.Tensor) -> Any:
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, (y @ WEIGHT).tanh() + y), (ZERO, x * 2))[1]


PROGRAMS = [a_map, a_scan, a_while_loop]


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_graph_is_refused_in_words(program: Callable[..., Any]) -> None:
    with pytest.raises(GraphBreakError, match=r"(map|scan|while_loop) compiles the functions that it is given"):
        dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_call_is_torchs_own(program: Callable[..., Any]) -> None:
    found = []
    for function in (program, dovetail.compile(program, backend="aten")):
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
        result = function(x) + 1
        wanted = [x, WEIGHT]
        found.append([result.detach(), *torch.autograd.grad(result.square().sum(), wanted, allow_unused=True)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
