"""A physics-informed network: the loss contains second derivatives of the network.

It solves u'' + u = 0 on [0, 2 pi] with u(0) = 0 and u'(0) = 1, whose solution is the sine. The whole loss is compiled, with
both derivatives inside, and its gradient by the parameters is the third order.

Compiling the whole step, with its derivatives and its optimizer, gives one graph and is the fastest; it is the last line shown.

    python examples/pinn.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dovetail

Wrap = Callable[[Any], Any]


def make_loss(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """The residual of the equation at some points, and the conditions at the start."""

    def loss(points: Tensor) -> Tensor:
        t = points.detach().requires_grad_()
        u = network(t)
        (first,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), t, create_graph=True)
        residual = (second + u).pow(2).mean()
        return residual + u[0].pow(2).sum() + (first[0] - 1).pow(2).sum()

    return loss


def prepare(wrap: Wrap, whole: bool = False, points: int = 64) -> Callable[[int], float]:
    """A training step that gives its loss; ``wrap`` compiles the loss, or the ``whole`` step with its optimizer."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    loss_of = make_loss(network) if whole else wrap(make_loss(network))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    t = torch.linspace(0, 2 * math.pi, points, dtype=torch.float64).unsqueeze(1)

    def update() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(t)
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = wrap(update) if whole else update
    return lambda number: compiled().item()


def train(wrap: Wrap, steps: int = 20, whole: bool = False) -> list[float]:
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
        losses = train(wrap, 1000, whole)
        print(f"{name:21} last loss {losses[-1]:.2e}, {time.perf_counter() - start:.1f} s with compiling")


if __name__ == "__main__":
    main()
