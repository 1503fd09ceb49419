"""``copy.deepcopy`` of what holds tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dovetail

pytestmark = pytest.mark.usefixtures("quiet")


class State:
    """What the programs below copy."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.buffer, self.weight, self.flat = torch.randn(3, 3), nn.Parameter(torch.randn(3, 3)), torch.randn(4, 3)
        self.nested: dict[str, Any] = {"a": torch.randn(3), "b": [torch.randn(3), 1]}
        self.best: Any = None

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def best_weights(s: State, x: torch.Tensor) -> Any:
    loss = s.step(x)
    s.best = copy.deepcopy(s.model.state_dict())
    return loss, s.best, s.best._metadata


def reptile(s: State, x: torch.Tensor) -> Any:
    before = copy.deepcopy(s.model.state_dict())
    s.step(x)
    loss, after = s.step(x), s.model.state_dict()
    s.model.load_state_dict({name: before[name] + (after[name] - before[name]) * 0.1 for name in before})
    return loss, after


def state_of_an_optimizer(s: State, x: torch.Tensor) -> Any:
    loss = s.step(x)
    return loss, copy.deepcopy(s.optimizer.state_dict())


def nested(s: State, x: torch.Tensor) -> Any:
    copied = copy.deepcopy(s.nested)
    copied["b"][0] *= 2
    return copied, s.nested["b"][0] + x


def one(s: State, x: torch.Tensor) -> Any:
    copied = copy.deepcopy(s.buffer)
    copied.mul_(x)
    return copied, s.buffer + 0


def twice_the_same(s: State, x: torch.Tensor) -> Any:
    first, second = copy.deepcopy([s.buffer, s.buffer])
    return first is second, first * x


def what_the_graph_made(s: State, x: torch.Tensor) -> Any:
    made = x * 2
    copied = copy.deepcopy([made])
    copied[0].add_(1)
    return made, copied


def a_parameter(s: State, x: torch.Tensor) -> Any:
    copied = copy.deepcopy(s.weight)
    loss = (copied * x).sum()
    loss.backward()
    return loss.detach(), copied.grad, s.weight.grad


def a_leaf(s: State, x: torch.Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    copied = copy.deepcopy(leaf)
    (copied * 2).sum().backward()
    return copied, copied.grad, leaf.grad


def shared_memory(s: State, x: torch.Tensor) -> Any:
    copied = copy.deepcopy([s.buffer, s.buffer.detach()])
    copied[0].add_(1)
    return copied


def a_part(s: State, x: torch.Tensor) -> Any:
    return copy.deepcopy(s.flat[1:]), s.flat.untyped_storage().nbytes()


def a_lazy_conjugate(s: State, x: torch.Tensor) -> Any:
    copied = copy.deepcopy(torch.complex(x, x).conj().detach())
    return copied.is_conj(), copied.imag


def no_leaf(s: State, x: torch.Tensor) -> Any:
    try:
        return copy.deepcopy(s.weight * x)
    except RuntimeError as error:
        return str(error)


def a_module(s: State, x: torch.Tensor) -> Any:
    return copy.deepcopy(s.model)(x)


WHOLE = (
    *(best_weights, reptile, state_of_an_optimizer, nested, one, twice_the_same, what_the_graph_made, a_parameter),
    a_leaf,
)


def _facts(value: Any) -> Any:
    """A result without its identity."""
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.stride(), value.requires_grad, value.is_leaf, type(value), value.dtype
    if isinstance(value, dict):
        return type(value), [(key, _facts(item)) for key, item in value.items()]
    return [_facts(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("function", [*WHOLE, shared_memory, a_part, a_lazy_conjugate, no_leaf, a_module])
def test_copies_are_eagers(function: Callable[[State, torch.Tensor], Any]) -> None:
    found = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=function in WHOLE)):
        state, seen = State(), []
        for number in range(3):
            torch.manual_seed(number)
            seen += [_facts(run(state, torch.randn(3, 3))), _facts(state.best), _facts(state.nested)]
        found.append(seen)
    assert found[1] == found[0]


def test_a_copy_stays_as_it_is_when_tensors_come_to_share_memory() -> None:
    """Eager copies memory that two tensors share once."""

    def function(pair: list[torch.Tensor]) -> list[torch.Tensor]:
        return copy.deepcopy(pair)

    compiled = dovetail.compile(function, backend="aten")
    compiled([torch.zeros(4), torch.zeros(4)])
    memory = torch.zeros(4)
    copies = compiled([memory, memory.detach()])
    copies[0].add_(1)
    assert copies[1].tolist() == [1] * 4 and memory.tolist() == [0] * 4
