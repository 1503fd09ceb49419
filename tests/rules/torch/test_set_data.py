"""``p.data = value``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dovetail

pytestmark = pytest.mark.usefixtures("quiet")


def in_place(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    p.data -= v * 0.1
    p.data *= 0.5
    return p.sum()


def by_a_name(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    data = p.data
    data += v
    p.data = data
    return (p * v).sum()


def a_view_of_its_own(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    p.data = p.detach().t().t()
    return (p * v).sum()


def the_other_way_round(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    p.data = p.data.t()
    return (p * v.t()).sum()


def a_part(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    p.data = p.data[1:]
    return p.sum() + v.sum()


def what_is_written_later(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    fresh = v * 2
    p.data = fresh
    fresh.add_(1)
    return p.sum()


def what_was_read_before(p: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    before = p.data
    p.data = before * 2 + v
    return p.sum(), before


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize(
    ("function", "breaks"),
    [
        *((item, False) for item in (in_place, by_a_name, a_view_of_its_own)),
        *((item, True) for item in (the_other_way_round, a_part, what_is_written_later, what_was_read_before)),
    ],
)
def test_the_data_is_eagers(function: Any, breaks: bool, backend: str) -> None:
    results = []
    for run in (function, dovetail.compile(function, backend=backend, fullgraph=not breaks)):
        torch.manual_seed(0)
        p, v = nn.Parameter(torch.randn(3, 3)), torch.randn(3, 3)
        alias, seen = p.detach(), []
        for _ in range(2 if function is not a_part else 1):
            results_of_call = run(p, v)
            first, *others = results_of_call if isinstance(results_of_call, tuple) else (results_of_call,)
            first.backward()
            seen += [first.item(), *others, p.detach().clone(), alias.clone(), p.grad.clone(), p._version, p.shape]  # type: ignore[union-attr]
            p.grad = None
        results.append(seen)
    assert str(results[1]) == str(results[0])


class Momentum(nn.Module):
    """A network and its slow copy."""

    def __init__(self, update: Callable[[Momentum], None]) -> None:
        super().__init__()
        self.fast = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
        self.slow = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).requires_grad_(False)
        self.update = update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fast = self.fast(x)
        self.update(self)
        with torch.no_grad():
            slow = self.slow(x)
        return (fast - slow).square().sum()


@torch.no_grad()
def under_no_grad(model: Momentum) -> None:
    for fast, slow in zip(model.fast.parameters(), model.slow.parameters(), strict=True):
        slow.data = slow.data * 0.9 + fast.data * 0.1


def named(model: Momentum) -> None:
    others = dict(model.fast.named_parameters())
    for name, slow in model.slow.named_parameters():
        if name != "2.bias":
            slow.data = slow.data.lerp(others[name].data, 0.1)


@pytest.mark.parametrize("update", [under_no_grad, named])
def test_an_update_of_many_weights_is_one_break(update: Any) -> None:
    losses: list[list[float]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Momentum(update)
        call = dovetail.compile(model.forward, backend="aten") if compiles else model.forward
        optimizer, seen = torch.optim.SGD(model.fast.parameters(), 0.1), []
        for _ in range(3):
            loss = call(torch.randn(4, 2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        losses.append(seen)
    assert losses[1] == losses[0]
    assert call.events.count("graph break") == 1  # type: ignore[attr-defined]
