"""Hessian-vector products of a compiled loss, and Newton's method with conjugate gradients on top of them.

A Hessian-vector product is the gradient of the scalar product of the gradient with a vector: second order, from outside.

Compiling the whole step, with its derivatives and its optimizer, gives one graph and is the fastest; it is the last line shown.

    python examples/hessian_vector.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dovetail

Wrap = Callable[[Any], Any]


def make_loss(weights: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Regularised logistic regression: convex, so that Newton's method finds its minimum."""

    def loss(x: Tensor) -> Tensor:
        return nn.functional.softplus(-targets * (weights @ x)).mean() + 0.01 * x.pow(2).sum()

    return loss


def hessian_vector(loss: Callable[[Tensor], Tensor], x: Tensor, vector: Tensor) -> Tensor:
    """The Hessian of ``loss`` at ``x`` times a vector."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad(gradient, x, vector)[0]


def solve(loss: Callable[[Tensor], Tensor], x: Tensor, right: Tensor, steps: int = 10) -> Tensor:
    """Solve ``H d = right`` by conjugate gradients."""
    result, residual, direction = torch.zeros_like(x), right, right
    for _ in range(steps):
        product = hessian_vector(loss, x, direction)
        length = residual.dot(residual) / direction.dot(product)
        result = result + length * direction
        following = residual - length * product
        direction = following + following.dot(following) / residual.dot(residual) * direction
        residual = following
    return result


def prepare(wrap: Wrap, whole: bool = False, size: int = 20) -> Callable[[int], float]:
    """A step of Newton's method that gives the loss before it; ``wrap`` compiles the loss, or the ``whole`` step."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(200, size, generator=generator, dtype=torch.float64)
    targets = torch.sign(weights @ torch.randn(size, generator=generator, dtype=torch.float64))
    loss = make_loss(weights, targets) if whole else wrap(make_loss(weights, targets))
    position = [torch.zeros(size, dtype=torch.float64)]

    def newton(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        value = loss(x)
        (gradient,) = torch.autograd.grad(value, x)
        return (x - solve(loss, x, gradient)).detach(), value.detach()

    compiled = wrap(newton) if whole else newton

    def step(number: int) -> float:
        position[0], value = compiled(position[0])
        return float(value)

    return step


def train(wrap: Wrap, steps: int = 4, whole: bool = False) -> list[float]:
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
        losses = train(wrap, 8, whole)
        print(f"{name:21} losses {losses}, {time.perf_counter() - start:.1f} s with compiling")


if __name__ == "__main__":
    main()
