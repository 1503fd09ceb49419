"""A tensor that has got a hook inside of the function and leaves it: what is seen of its gradient outside is behind the hook."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Tensor = torch.Tensor


def alone(x: Tensor) -> Any:
    h = x * 2
    h.register_hook(lambda gradient: gradient * 2)
    return (h,)


def used_inside_too(x: Tensor) -> Any:
    h = x * 2
    h.register_hook(lambda gradient: gradient * 2)
    return h, h * 3


def behind_a_break(x: Tensor) -> Any:
    h = x * 2
    h.register_hook(lambda gradient: gradient * 2)
    h.retain_grad()
    return (h,)


def a_view_of_it(x: Tensor) -> Any:
    h = x * 2
    h.register_hook(lambda gradient: gradient * 2)
    return (h.view_as(h),)


def _observed(how: str, results: Any) -> Any:
    first, seen = results[0], []
    if how == "retain_grad":
        first.retain_grad()
    elif how == "hook":
        first.register_hook(lambda gradient: seen.append(gradient.clone()))
    total = sum(item.sum() for item in results)
    if how == "grad":
        return torch.autograd.grad(total, first)
    total.backward(inputs=[first] if how == "inputs" else None)
    return seen, first.grad if how in ("retain_grad", "inputs") else None


@pytest.mark.parametrize("how", ["retain_grad", "hook", "grad", "inputs", "nothing"])
@pytest.mark.parametrize("function", [alone, used_inside_too, behind_a_break, a_view_of_it], ids=lambda it: it.__name__)
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.sampled(2)
def test_its_gradient_is_eagers(function: Callable[[Tensor], Any], how: str, fullgraph: bool) -> None:
    """It was the one in front of the hook."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in (function, dovetail.compile(function, backend="aten", fullgraph=fullgraph)):
            x = torch.ones(2, requires_grad=True)
            found.append((_observed(how, run(x)), x.grad))
    same(found[0], found[1])
