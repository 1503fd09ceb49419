"""Tensors that are made on a device that this process has not got: eager's error, where torch would end the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

pytestmark = pytest.mark.skipif(torch.xpu.is_available() or torch.mps.is_available(), reason="the devices are here")


def _parameter(x: torch.Tensor) -> torch.Tensor:
    return (torch.nn.Parameter(torch.zeros(2, device="xpu")) * x).sum()


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(2, device="mps", requires_grad=True).sum() * x


def _layer(x: torch.Tensor) -> torch.Tensor:
    with torch.device("xpu"):
        layer = torch.nn.Linear(2, 2)
    return layer(x).sum()  # type: ignore[no-any-return]


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, device="xpu").requires_grad_() * x


def _moved(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).to("xpu").sum()


def _otherwise(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    try:
        return torch.nn.Parameter(torch.ones(2, device="xpu")) * y
    except (AssertionError, RuntimeError):
        return y.sum()


def _answer(function: Callable[..., Any], x: torch.Tensor) -> Any:
    try:
        return function(x).tolist()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("function", [_parameter, _leaf, _layer, _like, _moved, _otherwise])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning", "ignore::dovetail.errors.EagerFallbackWarning")
def test_a_missing_device_raises_as_in_eager(function: Callable[..., Any], requires_grad: bool) -> None:
    compiled = dovetail.compile(function, backend="aten")
    for _ in range(2):
        x = torch.ones(2, requires_grad=requires_grad)
        assert _answer(compiled, x) == _answer(function, x)
