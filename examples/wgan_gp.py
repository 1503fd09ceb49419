"""A Wasserstein GAN with gradient penalty (Gulrajani et al., 2017) on points of a ring.

The critic and the generator are compiled; the penalty is the norm of the critic's gradient, taken outside of it, and is
differentiated by the critic's parameters: second order through a compiled module.

Compiling the whole step, with its derivatives and its optimizer, gives one graph and is the fastest; it is the last line shown.

    python examples/wgan_gp.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dovetail

Wrap = Callable[[Any], Any]


def ring(count: int, generator: torch.Generator) -> Tensor:
    """Points near the unit circle."""
    angle = torch.rand(count, generator=generator, dtype=torch.float64) * 2 * torch.pi
    noise = 0.05 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return torch.stack((angle.cos(), angle.sin()), 1) + noise


def penalty(critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """How far the norm of the critic's gradient is from 1 between real and generated points."""
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (gradient.norm(dim=1) - 1).pow(2).mean()


def prepare(wrap: Wrap, whole: bool = False, batch: int = 64) -> Callable[[int], float]:
    """A step that gives the critic's loss; ``wrap`` compiles the modules, or the ``whole`` steps with their optimizers."""
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(1)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).double()
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))

    make, judge = (generator, critic) if whole else (wrap(generator), wrap(critic))

    def update_critic(real: Tensor, noise: Tensor, mix: Tensor) -> Tensor:
        fake = make(noise).detach()
        loss = judge(fake).mean() - judge(real).mean() + 10 * penalty(judge, real, fake, mix)
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
        return loss.detach()

    def update_generator(noise: Tensor) -> None:
        for_generator.zero_grad()
        (-judge(make(noise)).mean()).backward()
        for_generator.step()

    steps = (wrap(update_critic), wrap(update_generator)) if whole else (update_critic, update_generator)

    def step(number: int) -> float:
        real = ring(batch, numbers)
        noise = torch.randn(batch, 4, generator=numbers, dtype=torch.float64)
        mix = torch.rand(batch, 1, generator=numbers, dtype=torch.float64)
        loss: Tensor = steps[0](real, noise, mix)
        if number % 3 == 2:
            steps[1](torch.randn(batch, 4, generator=numbers, dtype=torch.float64))
        return loss.item()

    return step


def train(wrap: Wrap, steps: int = 10, whole: bool = False) -> list[float]:
    """The losses of some steps."""
    step = prepare(wrap, whole)
    return [step(number) for number in range(steps)]


def main() -> None:
    """Eager beside compiled."""
    ways = (
        ("eager", lambda module: module, False),
        ("dovetail", dovetail.compile, False),
        ("dovetail, whole step", dovetail.compile, True),
    )
    for name, wrap, whole in ways:
        start = time.perf_counter()
        losses = train(wrap, 300, whole)
        print(f"{name:21} last losses {losses[-2:]}, {time.perf_counter() - start:.1f} s with compiling")


if __name__ == "__main__":
    main()
