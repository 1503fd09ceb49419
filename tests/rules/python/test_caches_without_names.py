"""A cache around a partial function, which has neither a name nor a module."""

from __future__ import annotations

import functools

import torch

import dovetail


class Recipe:
    """A result of a cache that is no constant."""

    def __init__(self, factor: int) -> None:
        self.factor = factor


cached_number = functools.lru_cache(functools.partial(max, 3))
cached_object = functools.lru_cache(functools.partial(Recipe))


def by_number(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * cached_number(n)


def by_object(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * cached_object(n).factor


def test_constants_stay_in_one_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    compiled = dovetail.compile(by_number, backend="aten", fullgraph=True)
    for n in (2, 5, 2):
        assert torch.equal(compiled(x, n), by_number(x, n))


def test_an_object_of_the_cache_stays_in_one_graph() -> None:
    x = torch.ones(3)
    compiled = dovetail.compile(by_object, backend="aten", fullgraph=True)
    for n in (2, 5, 2):
        assert torch.equal(compiled(x, n), by_object(x, n))
