"""What hooks and custom backwards do to Python objects happens at every backward, as in eager, and never while capturing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import dovetail

SEEN: list[Any] = []
STATE = {"step": 0}


class CountsItself(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        CountsItself.calls += 1
        return gradient * 3


class KeepsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        SEEN.append(gradient)
        return gradient * 3


def hook_appends(x: torch.Tensor) -> Any:
    y = x * 2
    y.register_hook(lambda g: SEEN.append(1))
    return y.sin()


def hook_is_append(x: torch.Tensor) -> Any:
    y = x * 2
    y.register_hook(SEEN.append)
    return y.sin()


def hook_counts(x: torch.Tensor) -> Any:
    def count(g: torch.Tensor) -> None:
        STATE["step"] += 1

    y = x * 2
    y.register_hook(count)
    return y.sin()


def hook_fills_result(x: torch.Tensor) -> Any:
    found: list[int] = []
    y = x * 2
    y.register_hook(lambda g: found.append(1))
    return y.sin(), found


def hook_reads_what_was_written(x: torch.Tensor) -> Any:
    STATE["step"] = 5
    y = x * 2
    y.register_hook(lambda g: g * STATE["step"])
    return y.sin()


def class_counts(x: torch.Tensor) -> Any:
    return CountsItself.apply(x)


def class_keeps(x: torch.Tensor) -> Any:
    return KeepsGradient.apply(x)


def observe(run: Any) -> list[Any]:
    SEEN.clear()
    CountsItself.calls = 0
    STATE["step"] = 0
    found = []
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        result = run(x)
        loss = result[0] if isinstance(result, tuple) else result
        before = (len(SEEN), CountsItself.calls, STATE["step"])
        loss.sum().backward()
        rest = result[1:] if isinstance(result, tuple) else ()
        found.append((before, len(SEEN), CountsItself.calls, STATE["step"], x.grad.tolist(), rest))  # type: ignore[union-attr]
    assert all(not isinstance(item, torch.Tensor) or type(item) is torch.Tensor for item in SEEN)
    return found


@pytest.mark.parametrize(
    "function",
    [
        hook_appends,
        hook_is_append,
        hook_counts,
        hook_fills_result,
        hook_reads_what_was_written,
        class_counts,
        class_keeps,
    ],
)
def test_effects_of_a_backward(function: Any) -> None:
    expected = observe(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dovetail.errors.EagerFallbackWarning)
        assert observe(dovetail.compile(function, backend="aten")) == expected
