"""``create_graph=True`` through captured backwards, over compiled and eager forwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.backward_capture import BackwardSession, open_session
from dovetail.errors import EagerFallbackWarning
from tests.backward_capture.test_scenarios import assert_same


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def penalty(model: nn.Module, forward: Callable[..., Any], size: int) -> list[Any]:
    """The gradient of a loss on the slope of a model."""
    torch.manual_seed(size)
    model.zero_grad()
    x = torch.randn(size, 3, dtype=torch.float64, requires_grad=True)
    value = forward(x)
    (slope,) = torch.autograd.grad(value.square().sum(), [x], create_graph=True)
    (slope.square().sum() + value.sum()).backward()
    return [slope.detach(), x.grad, *(p.grad for p in model.parameters())]


def test_a_compiled_forward_is_differentiated_twice() -> None:
    model = network()
    compiled = dovetail.compile(model, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerFallbackWarning)
        for size in (3, 5, 4):
            expected = penalty(model, model, size)
            with dovetail.compiled_autograd(backend="aten") as backwards:
                found = penalty(model, compiled, size)
            assert (backwards.runs, backwards.fallbacks) == (2, [])
            for left, right in zip(expected, found, strict=True):
                torch.testing.assert_close(left, right)


def test_one_capture_for_a_derivative_and_for_what_is_differentiated_again() -> None:
    """The engine's cache does not tell the two apart: each has a graph of its own."""
    model = network()
    compiled = dovetail.compile(model, backend="aten")
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    with open_session(BackwardSession()) as session:
        (plain,) = torch.autograd.grad(compiled(x).sum(), [x])
        (first,) = torch.autograd.grad(compiled(x).sum(), [x], create_graph=True)
        (again,) = torch.autograd.grad(compiled(x).sum(), [x])
        (second,) = torch.autograd.grad(first.square().sum(), [x])
    assert not plain.requires_grad and not again.requires_grad
    torch.testing.assert_close(plain, first.detach())
    assert torch.equal(plain, again)
    assert len(session.captures[0].graphs) == 2
    (eager,) = torch.autograd.grad(model(x).sum(), [x], create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(eager.square().sum(), [x])[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("orders", [2, 3, 4])
def test_every_order_is_captured(orders: int) -> None:
    def run() -> list[Any]:
        x = torch.linspace(0.5, 2, 4, dtype=torch.float64).requires_grad_()
        found = [(x.sin() * x.exp()).sum()]
        for _ in range(orders):
            found.append(torch.autograd.grad(found[-1].sum(), [x], create_graph=True)[0])
        return [item.detach() for item in found]

    expected = run()
    with warnings.catch_warnings(), dovetail.compiled_autograd(backend="aten") as backwards:
        warnings.simplefilter("error", EagerFallbackWarning)
        found = run()
    assert backwards.runs == orders
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_the_warning_of_eager_about_a_reference_cycle() -> None:
    def run() -> list[str]:
        x = torch.randn(3, requires_grad=True)
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            x.exp().sum().backward(create_graph=True)
        x.grad = None
        return [str(item.message)[:50] for item in record]

    def always(function: Callable[[], Any]) -> Any:
        torch.set_warn_always(True)
        try:
            return function()
        finally:
            torch.set_warn_always(False)

    expected = always(run)
    with open_session(BackwardSession()) as session:
        found = always(run)
    assert session.runs == 1
    assert expected
    assert_same(expected, found)
