"""One-step MAML (Finn et al., 2017) on sine waves: the outer gradient goes through the inner step of gradient descent.

The whole loss of one task is compiled, the inner gradient with it; the outer gradient is taken outside.

Compiling the whole step, with its derivatives and its optimizer, gives one graph and is the fastest; it is the last line shown.

    python examples/maml.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dovetail

Wrap = Callable[[Any], Any]


def network(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Two hidden layers, over explicit parameters."""
    for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
        x = nn.functional.linear(x, weight, bias).tanh()
    return nn.functional.linear(x, parameters[-2], parameters[-1])


def task_loss(parameters: list[Tensor], support: tuple[Tensor, Tensor], query: tuple[Tensor, Tensor]) -> Tensor:
    """The loss on the query points after one step on the support points."""
    inner = (network(parameters, support[0]) - support[1]).pow(2).mean()
    gradients = torch.autograd.grad(inner, parameters, create_graph=True)
    adapted = [value - 0.1 * gradient for value, gradient in zip(parameters, gradients, strict=True)]
    return (network(adapted, query[0]) - query[1]).pow(2).mean()


def prepare(wrap: Wrap, whole: bool = False, tasks: int = 4) -> Callable[[int], float]:
    """A step that gives the outer loss; ``wrap`` compiles the loss of a task, or the ``whole`` step with its optimizer."""
    torch.manual_seed(0)
    sizes = [(32, 1), (32,), (32, 32), (32,), (1, 32), (1,)]
    parameters = [(0.4 * torch.randn(*size, dtype=torch.float64)).requires_grad_() for size in sizes]
    loss_of = task_loss if whole else wrap(task_loss)
    optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def update(given: list[tuple[Tensor, Tensor]]) -> Tensor:
        optimizer.zero_grad()
        losses = []
        for x, y in given:
            loss = loss_of(parameters, (x[:10], y[:10]), (x[10:], y[10:])) / tasks
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).sum()

    compiled = wrap(update) if whole else update

    def sample() -> tuple[Tensor, Tensor]:
        amplitude, phase = 1 + 2 * torch.rand((), dtype=torch.float64), 3 * torch.rand((), dtype=torch.float64)
        x = 10 * torch.rand(20, 1, dtype=torch.float64) - 5
        return x, amplitude * (x + phase).sin()

    return lambda number: compiled([sample() for _ in range(tasks)]).item()


def train(wrap: Wrap, steps: int = 10, whole: bool = False) -> list[float]:
    """The losses of some steps."""
    step = prepare(wrap, whole)
    return [step(number) for number in range(steps)]


def main() -> None:
    """Eager beside compiled."""
    ways = (
        ("eager", lambda loss: loss, False),
        ("dovetail", dovetail.compile, False),
        ("dovetail, whole step", dovetail.compile, True),
    )
    for name, wrap, whole in ways:
        start = time.perf_counter()
        losses = train(wrap, 200, whole)
        print(f"{name:21} last losses {losses[-2:]}, {time.perf_counter() - start:.1f} s with compiling")


if __name__ == "__main__":
    main()
