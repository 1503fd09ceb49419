"""Tensors that are indexed by ``range(n)``, where ``n`` changes from call to call: no entry for each ``n``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import backward, captures, gradients, same

Tensor = torch.Tensor


def picked(x: Tensor, labels: Tensor) -> Any:
    n = x.shape[0]
    return x[range(n), labels.long()[:n]].log()


def set_in_rows(x: Tensor, labels: Tensor) -> Any:
    wanted = torch.full_like(x, 0.1)
    wanted[range(labels.shape[0]), labels] = 0.9
    return (x * wanted).sum()


def alone(x: Tensor, labels: Tensor) -> Any:
    return x[range(len(x))], x[:, range(1, 4)], x[range(0, x.shape[0], 2), 1]


def backwards(x: Tensor, labels: Tensor) -> Any:
    return x[labels[:1] * 0, range(x.shape[1] - 1, -1, -1)], x[range(x.shape[0] - 1, -1, -1)]


def in_another_way(x: Tensor, labels: Tensor) -> Any:
    rows = range(x.shape[0])
    return (
        x[rows, labels],
        x[list(range(x.shape[0]))],
        len(range(x.shape[0])),
        [range(x.shape[0])][0],
        x[range(len(x))[1:]],
    )


@pytest.mark.parametrize("function", [picked, set_in_rows, alone, backwards, in_another_way])
def test_an_index_of_as_many_numbers_as_there_are_rows(function: Callable[..., Any]) -> None:
    compiled = dovetail.compile(function, backend="aten")
    for seed, rows in enumerate((5, 7, 4, 9, 6, 2, 3, 8, 1)):
        generator = torch.Generator().manual_seed(seed)
        values, labels = torch.rand(rows, 5, generator=generator), torch.randint(0, 5, (rows,), generator=generator)
        found = []
        for run in (function, compiled):
            x = values.clone().requires_grad_()
            result = run(x, labels)
            backward(result)
            found.append((result, gradients([x])))
        same(*found, f"{rows} rows")
    if function is not in_another_way and sys.version_info < (3, 14):
        assert captures(compiled) <= 4


class _Shown(Tensor):
    def __getitem__(self, key: Any) -> Any:
        return type(key).__name__


def test_a_class_that_looks_at_the_index() -> None:
    def function(x: Tensor, shown: Any) -> Any:
        return x * 2, shown[range(x.shape[0])]

    compiled = dovetail.compile(function, backend="aten")
    for rows in (3, 4, 5):
        same(*(run(torch.ones(rows), torch.ones(2).as_subclass(_Shown)) for run in (function, compiled)))
