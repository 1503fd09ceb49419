"""Train a small message-passing network on energies and forces.

Forces are minus the gradient of the energy, so that a loss on forces is differentiated through a gradient: second order. The
energy is compiled and both derivatives are taken outside of it, as force-field codes are written. The number of neighbours
changes from structure to structure.

Compiling the whole step, with its derivatives and its optimizer, gives one graph and is the fastest; it is the last line shown.

    python examples/energy_and_forces.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dovetail

Wrap = Callable[[Any], Any]


class MessagePassing(nn.Module):
    """Atoms exchange messages along edges; each message is weighted by a learned function of the distance."""

    def __init__(
        self, elements: int = 3, width: int = 16, rounds: int = 2, basis: int = 8, cutoff: float = 3.0
    ) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.embedding = nn.Embedding(elements, width)
        self.register_buffer("centres", torch.linspace(0.0, cutoff, basis))
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(basis, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(rounds)
        )
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(rounds)
        )
        self.readout = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, elements: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
        """The energy of one structure."""
        source, target = edges
        distance = (positions[target] - positions[source]).pow(2).sum(1).sqrt()
        window = 0.5 * (torch.cos(distance * torch.pi / self.cutoff) + 1.0)
        basis = torch.exp(-4.0 * (distance.unsqueeze(1) - self.centres).pow(2))
        state = self.embedding(elements)
        for weigh, update in zip(self.filters, self.updates, strict=True):
            messages = state[source] * weigh(basis) * window.unsqueeze(1)
            state = state + update(torch.zeros_like(state).index_add(0, target, messages))
        result: Tensor = self.readout(state).sum()
        return result


def structures(count: int, atoms: int, cutoff: float) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Elements, positions, edges, energy and forces of random clusters under a pair potential."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * 3)
    found = []
    for _ in range(count):
        positions = grid[torch.randperm(len(grid), generator=generator)[:atoms]] * 1.4
        positions = (positions + 0.2 * torch.randn(atoms, 3, dtype=torch.float64, generator=generator)).requires_grad_()
        distance = torch.cdist(positions, positions) + 10 * torch.eye(atoms, dtype=torch.float64)
        energy = 0.5 * (torch.exp(-2 * (distance - 1.5)) - 2 * torch.exp(-(distance - 1.5))).sum()
        (gradient,) = torch.autograd.grad(energy, positions)
        edges = (distance < cutoff).nonzero().t().contiguous()
        elements = torch.randint(0, 3, (atoms,), generator=generator)
        found.append((elements, positions.detach(), edges, energy.detach(), -gradient))
    return found


def prepare(wrap: Wrap, whole: bool = False, atoms: int = 10) -> Callable[[int], float]:
    """A training step that gives its loss; ``wrap`` compiles the energy, or the ``whole`` step with its optimizer."""
    torch.manual_seed(0)
    model = MessagePassing().double()
    energy_of = model if whole else wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = structures(4, atoms, model.cutoff)

    def update(elements: Tensor, positions: Tensor, edges: Tensor, energy: Tensor, forces: Tensor) -> Tensor:
        positions = positions.clone().requires_grad_()
        predicted = energy_of(elements, positions, edges)
        (gradient,) = torch.autograd.grad(predicted, positions, create_graph=True)
        loss = (predicted - energy).pow(2) / atoms + (-gradient - forces).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = wrap(update) if whole else update
    return lambda number: compiled(*data[number % len(data)]).item()


def train(wrap: Wrap, steps: int = 8, whole: bool = False) -> list[float]:
    """The losses of some steps."""
    step = prepare(wrap, whole)
    return [step(number) for number in range(steps)]


def main() -> None:
    """Eager beside compiled."""
    ways = (
        ("eager", lambda model: model, False),
        ("dovetail", dovetail.compile, False),
        ("dovetail, whole step", dovetail.compile, True),
    )
    for name, wrap, whole in ways:
        start = time.perf_counter()
        losses = train(wrap, 40, whole)
        print(f"{name:21} last losses {losses[-3:]}, {time.perf_counter() - start:.1f} s with compiling")


if __name__ == "__main__":
    main()
