"""The gradient of a whole call goes through the autograd graph that its forward has left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.whole_calls import tapes

Step = Callable[[Any, torch.nn.Module, torch.Tensor], Any]


class Model(torch.nn.Module):
    """A recurrent network whose arguments and results other operators compute and read."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.network = torch.nn.LSTM(4, 4, num_layers=2, dropout=dropout)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, (state, _) = self.network(self.first(x).relu() * 2)
        return self.last(found.tanh() + 1) * state[-1].mean()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each gradient of a whole call, whether it went through a graph that was kept."""
    outcomes: list[bool] = []
    gradients = tapes.gradients

    def noted(*args: Any) -> Any:
        result = gradients(*args)
        outcomes.append(result is not None)
        return result

    monkeypatch.setattr(tapes, "gradients", noted)
    yield outcomes


def _both(step: Step, backend: str = "aten", dropout: float = 0.0, **options: Any) -> tuple[list[Any], list[Any]]:
    """What a step leaves in eager and compiled, at three lengths: its result and the gradients."""
    outcomes = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Model(dropout)
        function = dovetail.compile(model, backend=backend, dynamic=True, **options) if is_compiled else model
        outcome = []
        for length in (5, 3, 4):
            model.zero_grad()
            x = torch.randn(length, 2, 3, requires_grad=True)
            outcome.append((step(function, model, x), x.grad, *(item.grad for item in model.parameters())))
        outcomes.append(outcome)
    return outcomes[0], outcomes[1]


def _once(function: Any, model: torch.nn.Module, x: torch.Tensor) -> Any:
    loss = function(x).square().mean()
    loss.backward()
    return loss


def _twice(function: Any, model: torch.nn.Module, x: torch.Tensor) -> Any:
    loss = function(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def _batched(function: Any, model: torch.nn.Module, x: torch.Tensor) -> Any:
    result = function(x)
    tangents = torch.ones(2, *result.shape) * torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    return torch.autograd.grad(result, x, tangents, is_grads_batched=True)


def _two_orders(function: Any, model: torch.nn.Module, x: torch.Tensor) -> Any:
    (gradient,) = torch.autograd.grad(function(x).square().mean(), x, create_graph=True)
    gradient.square().sum().backward()
    return gradient


def _in_a_checkpoint(function: Any, model: torch.nn.Module, x: torch.Tensor) -> Any:
    loss = checkpoint(function, x, use_reentrant=False).square().mean()
    loss.backward()
    return loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("step", [_once, _twice, _batched, _two_orders, _in_a_checkpoint])
def test_gradients_are_eagers(step: Step, dropout: float) -> None:
    expected, got = _both(step, dropout=dropout)
    exact = {} if step is _two_orders else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(got, expected, **exact)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [None, *(pytest.param(item, marks=pytest.mark.slow) for item in (0.3, 0.0))])
def test_memory_that_kernels_take_again(budget: float | None) -> None:
    expected, got = _both(_once, "inductor", **({} if budget is None else {"memory_budget": budget}))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_the_function_does_not_run_again(backend: str, found: list[bool]) -> None:
    _both(_once, backend, **({"tiers": "wait"} if backend == "inductor" else {}))
    assert found and all(found)


def test_other_memory_is_another_graph() -> None:
    x = torch.randn(3, requires_grad=True)
    result = x.sin()
    kept = [result.detach(), tapes.token([x], [result])]
    asked: Any = ([0], [torch.ones(3)], [0])
    (gradient,) = tapes.gradients([x.detach()], *asked, kept) or [None]
    assert gradient is not None and torch.equal(gradient, x.detach().cos())
    assert tapes.gradients([x.detach().clone()], *asked, kept) is None
    assert tapes.gradients([x.detach()], *asked, [result.detach().clone(), kept[1]]) is None
    with torch.no_grad():
        x.add_(1)
    assert tapes.gradients([x.detach()], *asked, kept) is None


def test_a_graph_dies_with_what_the_backward_has_saved() -> None:
    model = Model()
    compiled = dovetail.compile(model, backend="aten")
    gc.collect()
    before = len(tapes._TAPES)
    loss = compiled(torch.randn(3, 2, 3)).sum()
    assert len(tapes._TAPES) == before + 1
    loss.backward()
    assert len(tapes._TAPES) == before
    result = compiled(torch.randn(3, 2, 3))
    assert len(tapes._TAPES) == before + 1
    del result
    assert len(tapes._TAPES) == before
    with torch.no_grad():
        compiled(torch.randn(3, 2, 3))
    assert len(tapes._TAPES) == before


def test_weights_that_are_written_to_before_the_backward() -> None:
    def step(function: Any, model: torch.nn.Module, x: torch.Tensor) -> Any:
        loss = function(x).square().mean()
        with torch.no_grad():
            model.network.weight_hh_l0.mul_(2)  # type: ignore[union-attr,operator]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return loss

    expected, got = _both(step)
    torch.testing.assert_close([item[0] for item in got], [item[0] for item in expected], rtol=0, atol=0)
