"""A second derivative takes from the forward what the forward has saved, and its numbers stay eager's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dovetail
from tests.differential import Rule, same

Function = Callable[..., Any]


class Counting(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.5 * torch.randn(*shape, dtype=torch.float64, generator=generator)).requires_grad_()


def layers(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ v) @ w).exp().sum()


def returns_what_it_saves(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = (x @ v).exp()
    return (hidden @ w).sum(), hidden


def writes_to_an_input(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x * 1).mul_(v.sum()).sigmoid_()
    return (y @ v @ w).tanh().sum()


def draws(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout((x @ v).tanh(), 0.5).matmul(w).exp().sum()


def the_same_twice(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ v).tanh() @ w * (x @ v).tanh().sum()).sin().sum()


def views(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ v).t().tanh()
    return (y[1:].t() @ w[1:]).view(-1).exp().sum()


def norms(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.layer_norm((x @ v).softmax(-1), (4,)).norm(dim=1)
    return (torch.nn.functional.softplus(w).sum() * y).max()


PROGRAMS = [layers, returns_what_it_saves, writes_to_an_input, draws, the_same_twice, views, norms]


def orders(function: Function, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """A result, its gradients, and those of a number made of all of them, up to the third order."""
    torch.manual_seed(4)
    results = function(x, v, w)
    results = results if isinstance(results, tuple) else (results,)
    total = sum(result.sin().sum() for result in results)
    found = list(results)
    for _ in range(3):
        gradients = torch.autograd.grad(total, (x, v, w), create_graph=True)
        found += gradients
        total = sum((gradient * gradient).sum() for gradient in gradients)
    return [value.detach() for value in found]


ROUNDED = Rule("close", tolerance=(1e-9, 1e-11), ignored=frozenset({"strides", "is_leaf", "requires_grad"}))


def close(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> None:
    same(expected, actual, exact=ROUNDED)


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda item: item.__name__)
@pytest.mark.sampled(5)
def test_three_orders(function: Function, backend: str) -> None:
    compiled = dovetail.compile(function, backend=backend, fullgraph=True)
    for seed in range(3):
        inputs = leaf(3, 4, seed=seed), leaf(4, 4, seed=seed + 10), leaf(4, 4, seed=seed + 20)
        close(orders(function, *inputs), orders(compiled, *inputs))


def test_the_forward_is_not_computed_again() -> None:
    compiled = dovetail.compile(layers, backend="aten", fullgraph=True)
    x, v, w = leaf(3, 4), leaf(4, 4, seed=1), leaf(4, 4, seed=2)
    for function in (layers, compiled):
        torch.autograd.grad(function(x, v, w), x, create_graph=True)
    counts = []
    for function in (layers, compiled):
        loss = function(x, v, w)
        with Counting() as counting:
            torch.autograd.grad(loss, x, create_graph=True)
        counts.append(counting.seen)
    eager, ours = counts
    assert ours["mm"] == eager["mm"] == 2
    assert ours["tanh"] == ours["exp"] == 0


def test_a_write_to_what_is_saved_is_eagers_error() -> None:
    compiled = dovetail.compile(returns_what_it_saves, backend="aten", fullgraph=True)
    x, v, w = leaf(3, 4), leaf(4, 4, seed=1), leaf(4, 4, seed=2)
    for function in (returns_what_it_saves, compiled):
        for when in ("before the first derivative", "before the second one"):
            loss, hidden = function(x, v, w)
            if when == "before the first derivative":
                with torch.no_grad():
                    hidden.mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    torch.autograd.grad(loss, x, create_graph=True)
                continue
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            with torch.no_grad():
                hidden.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(gradient.sum(), v)


def test_what_is_freed_is_freed() -> None:
    compiled = dovetail.compile(layers, backend="aten", fullgraph=True)
    x, v, w = leaf(3, 4), leaf(4, 4, seed=1), leaf(4, 4, seed=2)
    for function in (layers, compiled):
        loss = function(x, v, w)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.autograd.grad(gradient.sum(), v)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(gradient.sum(), v)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.slow
def test_sizes_that_change(dynamic: bool | None) -> None:
    compiled = dovetail.compile(layers, backend="aten", fullgraph=True, dynamic=dynamic)
    v, w = leaf(4, 4, seed=1), leaf(4, 4, seed=2)
    for size in (3, 5, 3, 7, 2):
        x = leaf(size, 4, seed=size)
        close(orders(layers, x, v, w), orders(compiled, x, v, w))


def test_half_of_the_outputs_first() -> None:
    def pair(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.exp() @ x).tanh().sum(), (v.exp() @ v).tanh().sum()

    compiled = dovetail.compile(pair, backend="aten", fullgraph=True)
    for _ in range(2):
        found = []
        for function in (pair, compiled):
            x, v = leaf(4, 4), leaf(4, 4, seed=1)
            one, two = function(x, v)
            one.backward()
            (gradient,) = torch.autograd.grad(two, v, create_graph=True)
            gradient.pow(2).sum().backward()
            assert x.grad is not None and v.grad is not None
            found.append([x.grad, v.grad])
        close(*found)


def test_a_gradient_penalty_on_the_parameters_of_a_module() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    model = model.double()
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    for seed in range(3):
        x = leaf(5, 2, seed=seed)
        found = []
        for function in (model, compiled):
            model.zero_grad()
            (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            ((gradient.norm(dim=1) - 1).pow(2).mean() + function(x).pow(2).mean()).backward()
            found.append([torch.zeros(1).double() if p.grad is None else p.grad for p in model.parameters()])
        close(*found)
