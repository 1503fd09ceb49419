"""A backward from some of the results: which tensors have a gradient of zeros then, and which have none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Tensor = torch.Tensor


class WithUnused(torch.autograd.Function):
    """Its second result is not used: the gradient of that is zeros, if a backward comes here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        return x * 2, y.sum()

    @staticmethod
    def backward(ctx: Any, one: Any, other: Any) -> Any:
        return one * 2, other.expand(3)


class Infinite(torch.autograd.Function):
    """A gradient that is not to be multiplied by zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * float("inf")


def rounded(x: Tensor, y: Tensor) -> Any:
    return x.round().sum(), (y * 2).sum()


def rounded_and_more(x: Tensor, y: Tensor) -> Any:
    return (x.round() * y).sum(), (x * 2).sum()


def nothing_used(x: Tensor, y: Tensor) -> Any:
    return WithUnused.apply(x, y)[0].sum(), (x * 3).sum()


def used_elsewhere(x: Tensor, y: Tensor) -> Any:
    return WithUnused.apply(x, y)[0].sum(), (y * x).sum(), y.floor().sum()


def overwritten(x: Tensor, y: Tensor) -> Any:
    return x.clone().fill_(1.0).sum() + y.sum(), (x * x).sum()


def chained(x: Tensor, y: Tensor) -> Any:
    return (x.round() * 2 + 1).exp().sum(), (x.sign() * y).sum(), y.sum()


def behind_an_infinity(x: Tensor, y: Tensor) -> Any:
    inner = Infinite.apply(x)
    return (inner.round() * y).sum(), inner.sum(), (x * y).sum()


@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize(
    "program", [rounded, rounded_and_more, nothing_used, used_elsewhere, overwritten, chained, behind_an_infinity]
)
def test_zeros_and_none(program: Callable[..., Any], backend: str) -> None:
    if program is behind_an_infinity and backend == "inductor":
        pytest.skip("Inductor's graph does not multiply the infinity by zeros that it knows")
    compiled = dovetail.compile(program, backend=backend, tiers="wait", fullgraph=True)
    count = len(program(*(torch.ones(3) for _ in range(2))))
    for chosen in itertools.product((False, True), repeat=count):
        if any(chosen):
            seen = []
            for run in (program, compiled):
                x, y = torch.linspace(-2, 2, 3, requires_grad=True), torch.linspace(1, 2, 3, requires_grad=True)
                results = run(x, y)
                torch.autograd.backward([item for item, flag in zip(results, chosen, strict=True) if flag])
                seen.append((x.grad, y.grad))
            same(*seen, exact=backend == "aten")
