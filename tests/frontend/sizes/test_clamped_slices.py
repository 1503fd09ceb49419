"""Slices at plain bounds of a size that varies: a graph for each side of the bound, and eager's result each time."""

from __future__ import annotations

import pytest
import torch

import dovetail
from tests.differential import same

Tensors = tuple[torch.Tensor, ...]


def _window(x: torch.Tensor) -> Tensors:
    return x.transpose(0, 1)[-7:] * 2, x[:, -7:]


def _head(x: torch.Tensor) -> Tensors:
    return x[:, :6].sum(-1), x[:, :6]


def _neighbours(x: torch.Tensor) -> Tensors:
    return (x[:, 1:] - x[:, :-1],)


def _one(x: torch.Tensor) -> Tensors:
    return x[:, :1], x[:, -1:].expand(-1, 3, -1)


def _written(x: torch.Tensor) -> Tensors:
    y = x * 1
    y[:, -5:] += 1
    y[:, :4].mul_(3)
    return (y,)


@pytest.mark.parametrize(
    ("program", "entries"),
    [
        (_window, 3),
        (_head, 3),
        (_one, 2),
        # A length of two leaves pairs of one neighbour: their strides are others.
        (_neighbours, 3),
        # What is written to is all of the memory, or a part of it.
        (_written, 4),
    ],
)
@pytest.mark.sampled(4)
def test_no_length_makes_a_graph_of_its_own(program: object, entries: int) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for length in (12, 9, 7, 6, 5, 8, 3, 4, 2):
        x = torch.randn(2, length, 4, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        expected, actual = program(twin), compiled(x)  # type: ignore[operator]
        same(expected, actual)
        assert [item.storage_offset() for item in expected] == [item.storage_offset() for item in actual]
        sum(item.square().sum() for item in expected).backward()
        sum(item.square().sum() for item in actual).backward()
        same(twin.grad, x.grad)
    assert len(compiled.entries) == entries


@pytest.mark.slow
def test_bounds_of_both_kinds() -> None:
    def program(x: torch.Tensor) -> Tensors:
        return x[:, 3:8].clone(), x[:, -9:-2] + 1, x[:, 3:-2] * 2, x[:, -100:100], x[:, 5:3], x[:, -2:-4]

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for length in (12, 11, 9, 8, 7, 6, 5, 4, 3, 2, 10, 30):
        x = torch.arange(2.0 * length * 3).reshape(2, length, 3)
        same(program(x), compiled(x))


def test_a_size_that_is_cut_off_is_guarded_on_where_it_is_read() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        short = x[:, -4:]
        return x * 2 if short.shape[1] < 4 else short

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for length in (12, 9, 3, 2, 4, 8):
        x = torch.randn(2, length)
        same(program(x), compiled(x))
    assert len(compiled.entries) == 3


def test_what_does_not_fit_is_eagers_error() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x[:, :6] + torch.ones(6)

    compiled = dovetail.compile(program, backend="aten")
    for length in (12, 9):
        x = torch.randn(2, length)
        same(program(x), compiled(x))
    with pytest.raises(RuntimeError, match="The size of tensor"):
        compiled(torch.randn(2, 5))
