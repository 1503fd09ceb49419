"""Backward scenarios with tensor subclasses that wrap other tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.backward_capture.scenarios import Run, grads, scenario


def two(*shape: int) -> nn.Parameter:
    """A leaf of two tensors."""
    return nn.Parameter(TwoTensor(torch.randn(shape), torch.randn(shape)))


class Scaled(torch.autograd.Function):
    """A function of subclasses, whose backward makes one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x


@scenario
def subclass_parameter(run: Run) -> Any:
    p, q = two(3, 4), nn.Parameter(torch.randn(4, 2))
    ((torch.randn(run.size, 3) @ p).sin() @ q).sum().backward()
    return grads(p, q)


@scenario
def subclass_gradients_add_up(run: Run) -> Any:
    p = two(run.size)
    for _ in range(2):
        (p.sin() + p.exp() * p).sum().backward()
    return grads(p)


@scenario
def subclass_gradients_asked_for(run: Run) -> Any:
    p = two(run.size, 2)
    h = p.exp()
    return torch.autograd.grad((h * h.sum(0)).sum(), [h, p])


@scenario
def hooks_on_subclasses(run: Run) -> Any:
    p = two(run.size)
    h = p.sin()
    h.register_hook(lambda gradient: run.note(type(gradient).__name__, isinstance(gradient, TwoTensor)) or gradient * 3)
    p.register_post_accumulate_grad_hook(lambda leaf: run.note(leaf.grad.a, isinstance(leaf, nn.Parameter)))
    (h * 2).sum().backward()
    return grads(p)


@scenario
def hook_takes_a_subclass_apart(run: Run) -> Any:
    p = two(run.size)
    h = p.sin()
    h.register_hook(lambda gradient: TwoTensor(gradient.a + 1, gradient.b * 2))
    h.sum().backward()
    return grads(p)


@scenario
def function_of_subclasses(run: Run) -> Any:
    p = two(run.size)
    Scaled.apply(p.exp()).sum().backward()
    return grads(p)


@scenario
def views_of_subclasses(run: Run) -> Any:
    p = two(run.size, 4)
    (p.t().reshape(-1)[::1] * 2).sum().backward()
    return grads(p)


@scenario
def second_derivative_of_subclasses(run: Run) -> Any:
    p = two(run.size)
    (first,) = torch.autograd.grad(p.pow(3).sum(), [p], create_graph=True)
    first.square().sum().backward()
    return [first, p.grad]
