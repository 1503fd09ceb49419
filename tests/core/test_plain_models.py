"""Plain models train under ``aten`` as in eager, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dovetail


class Block(nn.Module):
    """A layer of a small transformer, written with modules of torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.joint = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norms
        query, key, value = self.joint(first(x)).chunk(3, dim=-1)
        weights = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out(weights @ value)
        return x + self.mlp(second(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(17, 16), nn.Embedding(6, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(2)])
        self.head = nn.Linear(16, 17)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.tokens(indices) + self.places(torch.arange(indices.shape[1]))
        for number, block in enumerate(self.blocks):
            x = block(x) * (1.0 if number else 0.5)
        return self.head(x)


def mlp() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), lambda: torch.randn(4, 5)


def convolutions() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 3)), lambda: torch.randn(2, 3, 8, 8)


def transformer() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    return Transformer(), lambda: torch.randint(17, (2, 6))


@pytest.mark.parametrize("make", [mlp, convolutions, transformer])
def test_training_is_eagers_to_the_last_bit(make: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]) -> None:
    torch.manual_seed(0)
    model, batch = make()
    twin = copy.deepcopy(model)
    batches = [batch() for _ in range(4)]
    compiled = dovetail.compile(twin, backend="aten", fullgraph=True)
    losses = []
    for called, owner in ((model, model), (compiled, twin)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1, momentum=0.9)
        for item in batches:
            optimizer.zero_grad()
            loss = called(item).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert all(torch.equal(one, other) for one, other in zip(losses[:4], losses[4:], strict=True))
    for (name, one), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert len(compiled.compiled_call.entries) == 1
