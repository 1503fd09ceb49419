"""A derivative inside stops at leaves; what was captured for them is not used where a tensor was computed before the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from tests.differential import same

pytestmark = pytest.mark.usefixtures("quiet")


def squares(w: Tensor, b: Tensor) -> None:
    (b * b).sum().backward()


def product(w: Tensor, b: Tensor) -> Tensor | None:
    (w * b).sum().backward()
    return b.grad


def constant_factor(w: Tensor, b: Tensor) -> Tensor:
    a = w.detach().requires_grad_()
    torch.autograd.backward((a * b).sum())
    assert a.grad is not None
    return a.grad


def only_of_one(w: Tensor, b: Tensor) -> None:
    (w * b).sum().backward(inputs=[w])


def by_grad(w: Tensor, b: Tensor) -> Tensor:
    return torch.autograd.grad((w * b).sum(), w)[0]


def in_place(w: Tensor, b: Tensor) -> Tensor:
    b.detach_()
    return b * 2


def turned_off(w: Tensor, b: Tensor) -> Any:
    if b.requires_grad:
        b.requires_grad_(False)
    return b * 2


def _leaf(w: Tensor) -> Tensor:
    return torch.ones(3, requires_grad=True)


def _computed(w: Tensor) -> Tensor:
    return torch.ones(3, requires_grad=True) * 2


def _computed_from_the_other(w: Tensor) -> Tensor:
    with torch.enable_grad():
        return w * 2


KINDS = (_leaf, _computed, _computed_from_the_other)


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize(
    ("function", "grad_enabled"),
    [
        *((each, True) for each in (squares, product, constant_factor, only_of_one, by_grad, in_place, turned_off)),
        *((each, False) for each in (in_place, turned_off)),
    ],
)
def test_leaves_and_tensors_that_were_computed(function: Callable[..., Any], grad_enabled: bool, first: Any) -> None:
    def calls(run: Callable[..., Any]) -> list[Any]:
        found: list[Any] = []
        for kind in (first, *KINDS, first):
            w = torch.ones(3, requires_grad=True)
            b = kind(w)
            with torch.set_grad_enabled(grad_enabled):
                try:
                    result = run(w, b)
                except RuntimeError as error:
                    found.append(str(error)[:40])
                    continue
            found.append((result, w.grad, b.grad if b.is_leaf else None, b.requires_grad, b.is_leaf))
        return found

    same(calls(function), calls(dovetail.compile(function, backend="aten")))


def test_the_weights_behind_an_input() -> None:
    """The weights behind an input get their gradients, in every call."""

    def step(x: Tensor) -> None:
        x.square().sum().backward()

    compiled = dovetail.compile(step, backend="aten")
    weight = torch.ones(2, requires_grad=True)
    compiled(torch.ones(2, requires_grad=True))
    for _ in range(2):
        compiled(weight * 3)
    same(weight.grad, torch.full((2,), 36.0))
