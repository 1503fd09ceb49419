"""The eager backend replays calls: what torch keeps between calls, and what runs again in a backward, is eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dovetail

BF16 = torch.bfloat16
MakeStep = Callable[[nn.Module], Callable[[Tensor], Tensor]]
STEPS: dict[str, MakeStep] = {}


def step(function: MakeStep) -> MakeStep:
    STEPS[function.__name__] = function
    return function


@step
def written_after_the_block(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            y = model(x).float().sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        return y.detach()

    return run


@step
def two_blocks(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            y = model(x).float().sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        with torch.autocast("cpu", dtype=BF16):
            return (y + model(x).float().sum()).detach()

    return run


@step
def forward_alone(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return model(x).float().square().mean()

    return run


@step
def a_whole_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


@step
def checkpointed(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(model, x, use_reentrant=False).square().mean()  # type: ignore[no-any-return]


@step
def checkpointed_without_the_generator(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).square().mean()  # type: ignore[no-any-return]


@step
def checkpointed_reentrant(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(model, x, use_reentrant=True).square().mean()  # type: ignore[no-any-return]


def train(make: MakeStep, wrap: Callable[[Any], Any], *, outer: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, seen = wrap(make(model)), []
    for _ in range(4):
        x = torch.randn(6, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=BF16, enabled=outer):
            loss = run(x)
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seen += [loss.item(), torch.rand(1).item(), *(value.clone() for value in model.state_dict().values())]
    return seen


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(8)
def test_training_is_that_of_eager(name: str, backend: str, outer: bool) -> None:
    expected = train(STEPS[name], lambda function: function, outer=outer)
    found = train(STEPS[name], lambda function: dovetail.compile(function, backend=backend), outer=outer)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
