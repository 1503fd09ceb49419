"""The suite's models: each is trained for a few steps and run for inference; losses, parameters, buffers and gradients count."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dovetail.testing.cases import Case, Compile, program_case, state_of

Batch = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Perceptron(nn.Module):
    """Two layers with a norm between them, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.last(self.first(functional.gelu(self.norm(self.first(x)))))  # type: ignore[no-any-return]


class ConvNet(nn.Module):
    """Convolutions with a batch norm, whose buffers change while training, and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x))), 2)
        return self.last(functional.silu(self.second(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """One block of a causal transformer on a table of tokens, with dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, from the last place."""
        x = self.table(tokens)
        parts = self.mix(self.norm(x)).split(8, dim=-1)
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        scores = query @ key.transpose(-1, -2) / 2.0
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x[:, -1] @ self.table.weight.t()


class Recurrent(nn.Module):
    """A cell called in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores after the last time step."""
        state = x.new_zeros(x.shape[0], 6)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.last(state)  # type: ignore[no-any-return]


def _numbers(*size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*size), torch.randint(3, (size[0],))


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(11, (3, 5)), torch.randint(11, (3,))


def _train(make: Callable[[], nn.Module], batch: Batch, compile: Compile) -> Any:
    model = make()
    compiled = compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(3):
        inputs, targets = batch()
        loss = functional.cross_entropy(compiled(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return losses, state_of(model)


def _infer(make: Callable[[], nn.Module], batch: Batch, compile: Compile) -> Any:
    model = make().eval()
    compiled = compile(model)
    with torch.no_grad():
        return [compiled(batch()[0]) for _ in range(2)], state_of(model)


def _accumulate(compile: Compile) -> Any:
    model = Perceptron()
    compiled = compile(model)
    for _ in range(2):
        inputs, targets = _numbers(4, 8)
        functional.cross_entropy(compiled(inputs), targets).backward()  # type: ignore[no-untyped-call]
    return state_of(model)


def _whole_step(compile: Compile) -> Any:
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    compiled = compile(step)
    losses = [compiled(*_numbers(4, 8)) for _ in range(3)]
    return losses, state_of(model), [value for state in optimizer.state.values() for value in state.values()]


def _frozen_part(compile: Compile) -> Any:
    model = Perceptron()
    model.first.requires_grad_(False)
    compiled = compile(model)
    inputs, targets = _numbers(4, 8)
    inputs.requires_grad_()
    functional.cross_entropy(compiled(inputs), targets).backward()  # type: ignore[no-untyped-call]
    return state_of(model), inputs.grad


_MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "perceptron": (Perceptron, functools.partial(_numbers, 4, 8)),
    "convolutions and batch norm": (ConvNet, functools.partial(_numbers, 3, 2, 8, 8)),
    "transformer with dropout": (Transformer, _tokens),
    "recurrent cell": (Recurrent, functools.partial(_numbers, 3, 5, 4)),
}

MODEL_CASES: tuple[Case, ...] = (
    *(program_case("models", f"{name}, trained", functools.partial(_train, *model)) for name, model in _MODELS.items()),
    *(
        program_case("models", f"{name}, inference", functools.partial(_infer, *model))
        for name, model in _MODELS.items()
    ),
    program_case("models", "gradients of two batches added up", _accumulate),
    program_case("models", "a whole step, optimizer included", _whole_step, may_refuse=True),
    program_case("models", "frozen parameters, gradient of the input", _frozen_part),
)
