"""Python numbers that change between calls and are first read inside of a transform, or of a block with another default device."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

import dovetail
from tests.differential import same

NUMBERS = {"factor": 2.0, "count": 3}


def _in_vmap(x: torch.Tensor) -> torch.Tensor:
    return vmap(lambda t: t * NUMBERS["factor"])(x)


def _in_both(x: torch.Tensor) -> torch.Tensor:
    return vmap(grad(lambda t: (t * NUMBERS["factor"]).sin()))(x) * NUMBERS["factor"]


def _arithmetic(x: torch.Tensor) -> torch.Tensor:
    return grad(lambda t: (t * (NUMBERS["factor"] + 1) / NUMBERS["count"]).sin().sum())(x)


def _second(x: torch.Tensor) -> torch.Tensor:
    return hessian(lambda t: (t * NUMBERS["factor"]).sin().sum())(x)


def _forward_mode(x: torch.Tensor) -> torch.Tensor:
    return jvp(lambda t: (t * NUMBERS["factor"]).sin(), (x,), (x,))[1]


def _on_another_device(x: torch.Tensor) -> torch.Tensor:
    with torch.device("meta"):
        sizes = torch.empty(NUMBERS["count"]) * NUMBERS["factor"]
    return x * NUMBERS["factor"] + sizes.shape[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [_in_vmap, _in_both, _arithmetic, _second, _forward_mode, _on_another_device])
def test_one_graph_for_all_numbers(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiled, x = dovetail.compile(function, backend="aten", fullgraph=True), torch.rand(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        for factor, count in ((2.0, 3), (5.0, 4), (7.0, 5), (0.3, 6)):
            NUMBERS.update(factor=factor, count=count)
            same(function(x), compiled(x), exact=False)
    assert len(compiled.entries) == 2
