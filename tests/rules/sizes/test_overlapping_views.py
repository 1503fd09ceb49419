"""Windows that overlap, by ``as_strided`` with sizes that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.differential import check_calls, randn

CALLS = [(randn(rows, length, 3, grad=True),) for rows, length in ((2, 12), (3, 16), (5, 8), (4, 24))]


def _windows(x: Any) -> Any:
    rows, length, width = x.shape
    x = x * 2
    row, step, one = x.stride()
    return x.as_strided((rows, length // 2 - 1, 4, width), (row, 2 * step, step, one))


def _count_in_a_tensor(x: Any) -> Any:
    x = x * 2
    count = torch.div(x.shape[1], 2, rounding_mode="trunc") - 1
    row, step, one = x.stride()
    return x.as_strided((x.shape[0], count, 4, 3), (row, 2 * step, step, one))


def _windows_by_function(x: Any) -> Any:
    x = x.transpose(0, 1).contiguous()
    length, rows, width = x.shape
    step, row, one = x.stride()
    windows = torch.as_strided(x, size=(length - 2, 3, rows, width), stride=(step, step, row, one))
    return torch.tanh(windows).sum(1), x


def _apart(x: Any) -> Any:
    x = x * 2
    rows, length, width = x.shape
    return x.as_strided((rows, length // 2, width), (length * width, 2 * width, 1)) * 3


def _written(x: Any) -> Any:
    x = x * 2
    windows = x.as_strided((x.shape[1] - 1, 2), (3, 3))
    with torch.no_grad():
        x.mul_(0.5)
    return windows * 1, x


@pytest.mark.parametrize("function", [_windows, _count_in_a_tensor, _apart])
def test_two_graphs_for_all_sizes(function: Any) -> None:
    check_calls(function, CALLS, entries=2)


@pytest.mark.slow
def test_windows_of_the_first_dimension() -> None:
    check_calls(_windows_by_function, CALLS)


@pytest.mark.slow
def test_windows_that_are_written_to() -> None:
    def write(x: Any) -> Any:
        windows = _windows(x)
        windows.select(2, 0).mul_(3)
        return windows * 1

    check_calls(write, CALLS)
    check_calls(_written, CALLS)


class _Neighbours(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.length = x.shape[0]
        return x.as_strided((x.shape[0] - 1, 2), (1, 1))

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        nothing = tangent.new_zeros(1)
        return torch.cat([tangent[:, 0], nothing]) + torch.cat([nothing, tangent[:, 1]])


def test_the_gradient_of_a_result_whose_places_share_memory() -> None:
    # A gradient that was laid out like the result would be written over by itself.
    check_calls(lambda x: _Neighbours.apply(x * 2), [(randn(length, grad=True),) for length in (5, 6, 8)], entries=2)


@pytest.mark.slow
def test_second_derivative() -> None:
    def penalty(x: Any) -> Any:
        (slope,) = torch.autograd.grad((_windows(x) ** 3).sum(), x, create_graph=True)
        return slope.square().sum(1)

    check_calls(penalty, CALLS)
