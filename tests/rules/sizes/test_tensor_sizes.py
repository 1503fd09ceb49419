"""Tensors that stand for sizes: computed of sizes alone, they are known numbers, for all sizes in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


def _chunks(x: torch.Tensor) -> Any:
    count = torch.div(x.shape[0], 2, rounding_mode="trunc")
    return x[: count * 2].view(count, 2, x.shape[1]).sum(1), count


def _made(x: torch.Tensor) -> Any:
    count = torch.floor_divide(x.shape[0], 3)
    return x.new_zeros((count + 1, x.shape[1])), torch.ones((count, 2)), torch.zeros(2, count), x[:1].expand(count, -1)


def _strided(x: torch.Tensor) -> Any:
    count = torch.divide(x.shape[0], 2, rounding_mode="floor") - 1
    return x.as_strided(size=(count, 2), stride=(x.stride(0), 1)) * 2, x.narrow(0, 0, count)


def _true_division(x: torch.Tensor) -> Any:
    return (
        torch.div(x.shape[0], 3) * x,
        torch.div(7, 2),
        torch.floor_divide(-7, 2),
        torch.div(-7, 2, rounding_mode="trunc"),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [_chunks, _made, _strided, _true_division])
def test_one_graph_for_all_sizes(program: Any) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    entries = []
    for rows in (12, 9, 7, 6, 8, 11):
        x, twin = (torch.arange(4.0 * rows).reshape(rows, 4).requires_grad_() for _ in range(2))
        expected, actual = program(twin), compiled(x)
        same(expected, actual)
        if expected[0].requires_grad:
            expected[0].sum().backward()
            actual[0].sum().backward()
            same(twin.grad, x.grad)
        entries.append(len(compiled.entries))
    # With the second size comes the graph for a quotient of 1 too, where that is a case of its own.
    assert entries[0] == 1
    assert entries[1] in (2, 3)
    assert len(set(entries[1:])) == 1


def test_tensors_in_the_place_of_tensors_stay() -> None:
    def program(x: torch.Tensor) -> Any:
        count = torch.div(x.shape[0], 2, rounding_mode="trunc")
        return torch.stack([count, count + 1]), torch.where(count > 3, x, -x), count.reshape(1)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for rows in (12, 9, 7, 6):
        x = torch.randn(rows, 2)
        same(program(x), compiled(x))
    assert len(compiled.entries) == 2


def test_a_division_by_zero_is_eagers_error() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.div(x.shape[0], 0, rounding_mode="trunc") + x

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        program(torch.ones(3))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        dovetail.compile(program, backend="aten")(torch.ones(3))


def test_sizes_that_the_data_decides() -> None:
    def program(x: torch.Tensor, index: torch.Tensor) -> Any:
        count = index.max() + 1
        return x.new_zeros(count, 2).index_add(0, index, x), torch.ones(2, index[0]), x.repeat(index[-1], 1)

    compiled = dovetail.compile(program, backend="aten")
    for index in ([2, 1, 2, 3], [4, 1, 2, 2], [0, 0, 0, 0], [1, 7, 1, 1]):
        same(program(torch.ones(4, 2), torch.tensor(index)), compiled(torch.ones(4, 2), torch.tensor(index)))
    assert dovetail.events_of(compiled).count("graph break") == 0
