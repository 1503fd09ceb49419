"""Functions of torch that ask for plain sizes by themselves: one graph for all sizes all the same, and eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import dovetail
from tests.differential import check_entries

SIZES = ((2, 6), (3, 9), (5, 8), (4, 11))


def rows(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, 4, length, requires_grad=True)


def images(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, 4, length, length + 1, requires_grad=True)


CALLS: dict[str, tuple[Callable[[int, int], torch.Tensor], Callable[[torch.Tensor], Any]]] = {
    "pooling": (rows, lambda x: functional.max_pool1d(x, 3, 2, padding=1, ceil_mode=True)),
    "pooling without batch": (rows, lambda x: functional.max_pool1d(x[0], (2,))),
    "pooling with indices": (rows, lambda x: functional.max_pool1d(x, 2, return_indices=True)),
    "pooling module": (rows, torch.nn.MaxPool1d(3, dilation=2)),
    "pooling by torch": (rows, lambda x: torch.max_pool1d(x, [2], [1])),
    "cosine": (rows, lambda x: functional.cosine_similarity(x, x.flip(1), dim=1)),
    "cosine of broadcast": (rows, lambda x: functional.cosine_similarity(x, x[:, :1], dim=-1, eps=1e-3)),
    "cosine of zeros": (rows, lambda x: functional.cosine_similarity(x * 0, x)),
    "circular padding": (rows, lambda x: functional.pad(x, (1, 2), mode="circular")),
    "circular padding of images": (images, lambda x: functional.pad(x, (1, 1, 2, 1), mode="circular")),
    "antialias": (images, lambda x: functional.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True)),
    "antialias to a size": (images, lambda x: functional.interpolate(x, (5, 4), mode="bicubic", antialias=True)),
    "nearest image": (images, lambda x: functional.interpolate(x, scale_factor=2)),
    "bilinear image": (images, lambda x: functional.interpolate(x, scale_factor=0.6, mode="bilinear")),
    "bicubic image to a size": (images, lambda x: functional.interpolate(x, (7, 9), mode="bicubic")),
    "recomputed scale": (
        images,
        lambda x: functional.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
    ),
    "recomputed scale, nearest": (
        images,
        lambda x: functional.interpolate(x, scale_factor=1.7, recompute_scale_factor=True),
    ),
    "random numbers": (
        rows,
        lambda x: x * torch.randn(x.shape, generator=None) + torch.rand(x.shape[-1], generator=None),
    ),
    "clamp_": (rows, lambda x: (x * 2).clamp_(-0.5, 0.5)),
    "clamp_min_ of a slice": (rows, lambda x: torch.cat([y := x * 2, y[:, 1:].clamp_min_(0.1)], 1)),
    "triu_": (images, lambda x: (x * 2).triu_(1)),
    "nan_to_num_": (rows, lambda x: (x * 2).nan_to_num_()),
    "fill_diagonal_": (images, lambda x: (x[0, 0] * 2).fill_diagonal_(3)),
    "fill_diagonal_ of a square": (rows, lambda x: (x[0].t() @ x[0]).fill_diagonal_(0.5)),
    "ne_": (rows, lambda x: (x.detach() * 2).ne_(torch.tensor(0.5))),
    "logit_": (rows, lambda x: (x * 0.1).logit_(0.1)),
    "exponential_": (rows, lambda x: x * torch.empty_like(x).exponential_()),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sampled(15)
def test_one_graph_for_all_sizes(name: str) -> None:
    make, function = CALLS[name]
    torch.manual_seed(0)

    def program(x: torch.Tensor) -> Any:
        return function(x)

    assert check_entries(program, [(make(*size),) for size in SIZES]) == 2


def test_a_write_in_place_does_not_change_the_dtype() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).clamp_(torch.tensor([0.5]))

    compiled = dovetail.compile(program, backend="aten", dynamic=True)
    with pytest.raises(RuntimeError, match="can't be cast"):
        compiled(torch.arange(6))


def test_writes_that_do_overlap_are_refused_at_symbolic_sizes() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, 1:].copy_(y[:, :-1])
        return y

    compiled = dovetail.compile(program, backend="aten", fullgraph=True, dynamic=True)
    with pytest.raises(dovetail.errors.DovetailError, match="memory that it also reads"):
        compiled(torch.randn(3, 5))


def test_halves_that_lie_apart_only_at_some_sizes() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, :3].copy_(y[:, -3:])
        return y

    assert check_entries(program, [(torch.randn(2, size),) for size in (6, 9, 7, 12)]) == 2
    compiled = dovetail.compile(program, backend="aten", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x := torch.randn(2, 9)), program(x))
    with pytest.raises(dovetail.errors.DovetailError, match="memory that it also reads"):
        compiled(torch.randn(2, 5))
