"""The whole training step, forward, backward, optimizer and ``zero_grad``, in one compiled function, against eager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Step = Callable[..., Any]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
MakeStep = Callable[[torch.nn.Module, torch.optim.Optimizer], Step]


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batch(seed: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def zeroing_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def train(
    make_optimizer: MakeOptimizer,
    make_step: MakeStep = zeroing_step,
    steps: int = 20,
    between: Callable[[int, torch.nn.Module, torch.optim.Optimizer], None] = lambda index, model, optimizer: None,
    fullgraph: bool = True,
    after: bool = True,
) -> Any:
    """Train twins, one eagerly and one compiled, and compare all that a step leaves behind after each step."""
    models = network(), network()
    optimizers = [make_optimizer(model.parameters()) for model in models]
    eager = make_step(models[0], optimizers[0])
    compiled = dovetail.compile(make_step(models[1], optimizers[1]), backend="aten", fullgraph=fullgraph)
    for index in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            between(index, model, optimizer)
        torch.manual_seed(index)
        expected = eager(*batch(index))
        torch.manual_seed(index)
        same(expected, compiled(*batch(index)), f"the result of step {index}")
        for name, twin in zip(("parameters", "grad"), (list, gradients), strict=True):
            same(twin(models[0].parameters()), twin(models[1].parameters()), f"{name} after step {index}")
        same(optimizers[0].state_dict(), optimizers[1].state_dict(), f"the state after step {index}")
    return compiled


def gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in parameters]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd-nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_leave_what_eager_leaves(name: str) -> None:
    train(OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["sgd-momentum", "adam"])
def test_gradients_are_kept_and_accumulate_without_zero_grad(name: str) -> None:
    train(OPTIMIZERS[name], plain_step, steps=4)
