"""``torch.cond`` and its kin: the graph breaks there, with gradients, closures and modules as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import dovetail
from dovetail.errors import GraphBreakError, GraphBreakWarning
from tests.differential import check_calls

LINEAR = torch.nn.Linear(2, 2)


def by_data(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.cos(), lambda x: x.sin(), [x * 2]) + 1


def with_a_module(x: torch.Tensor) -> Any:
    y, shift = LINEAR(x), x.exp()
    return torch.cond(x.sum() > 0, lambda z: LINEAR(z) + shift, lambda z: z * shift, (y,)).sum()


def inside_of_a_helper(x: torch.Tensor) -> Any:
    def choose(y: torch.Tensor) -> torch.Tensor:
        def first(z: torch.Tensor) -> torch.Tensor:
            return z.tanh()

        return torch.cond(pred=y.sum() > 0, true_fn=first, false_fn=torch.exp, operands=(y,))

    return choose(x * 2) * choose(x - 1)


def a_loop(x: torch.Tensor) -> Any:
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (start, x.detach().sin()))[1] + x


def a_scan(x: torch.Tensor) -> Any:
    return scan(lambda carry, y: (carry + y, carry * y), x[0] * 1, x * 1, dim=0)


def a_map(x: torch.Tensor) -> Any:
    return mapped(lambda row: row.sin(), x * 1).sum()


PROGRAMS = [by_data, with_a_module, inside_of_a_helper, a_loop, a_scan, a_map]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda item: item.__name__)
def test_the_graph_breaks(program: Callable[..., Any]) -> None:
    inputs = [(sign * torch.ones(2, 2)).requires_grad_() for sign in (1, -1, 1)]
    with pytest.warns(GraphBreakWarning, match="compiles the functions that it is given with torch.compile"):
        check_calls(program, [(x,) for x in inputs], backend="aten", fullgraph=False, exact="close")


def test_one_graph_is_refused_in_words() -> None:
    with pytest.raises(GraphBreakError, match="torch.cond compiles the functions .*\n.*by_data|torch.where"):
        dovetail.compile(by_data, backend="aten", fullgraph=True)(torch.ones(2, 2))


def test_a_plain_condition_is_part_of_the_graph() -> None:
    def program(x: torch.Tensor, flag: bool) -> Any:
        return torch.cond(flag, lambda x: x.cos(), lambda x: x.sin(), [x]) * 2

    x = torch.ones(3, requires_grad=True)
    check_calls(program, [(x, True), (x, False), (x, True)], backend="aten", fullgraph=True)
