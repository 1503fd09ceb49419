"""Models, batches and single-process training that the tests of several processes compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Tied(nn.Module):
    """Two layers with one weight, one parameter that is used twice, one that is not used, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        return self.head(torch.tanh(self.second(hidden)) * self.scale)  # type: ignore[no-any-return]


class TwoHeads(nn.Module):
    """Two outputs with a layer of their own each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.left(hidden), self.right(hidden)


def deep() -> nn.Module:
    """Layers of sizes that four ranks cannot share evenly."""
    return nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2))


class ComputedAgain(nn.Module):
    """The layers of :func:`deep`, of which the backward computes all but the last again."""

    def __init__(self) -> None:
        super().__init__()
        *before, self.head = deep()
        self.body = nn.Sequential(*before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "deep": deep,
    "tied": Tied,
    "two heads": TwoHeads,
    "computed again": ComputedAgain,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def build(name: str, rank: int = 0) -> nn.Module:
    """A model, the same on all ranks only if the first rank's parameters are sent to the others."""
    torch.manual_seed(rank)
    return MODELS[name]()


def batches(count: int, part: int = 0, parts: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a rank: its part of each of the whole ones."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
        yield x.chunk(parts)[part], y.chunk(parts)[part]


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool = True) -> Callable[..., torch.Tensor]:
    """A whole training step."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        return loss.detach()

    return step


def trained_alone(name: str, optimizer: str, count: int = 4, clip: bool = True) -> dict[str, torch.Tensor]:
    """The weights after training in one process, in eager, on whole batches."""
    model = build(name)
    step = make_step(model, OPTIMIZERS[optimizer](model.parameters()), clip)
    for x, y in batches(count):
        step(x, y)
    return weights(model)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
