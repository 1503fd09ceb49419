"""Backward scenarios that differentiate a backward again (``create_graph=True``)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tests.backward_capture.scenarios import Run, grads, leaf, scenario


@scenario
def backward_with_create_graph(run: Run) -> Any:
    x = leaf(run.size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x.pow(3).sum().backward(create_graph=True)
    first = x.grad
    x.grad = None
    first.square().sum().backward()
    return [first, x.grad]


@scenario
def accumulates_what_can_be_differentiated(run: Run) -> Any:
    x = leaf(run.size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x.sin().sum().backward()
        before = x.grad
        x.exp().sum().backward(create_graph=True)
        run.note(before, before is x.grad)
        total = x.grad
        (second,) = torch.autograd.grad(total.square().sum(), [x])
    return [total, second]


@scenario
def layout_with_create_graph(run: Run) -> Any:
    x = torch.randn(4, run.size).t().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (x.contiguous() ** 2).sum().backward(create_graph=True)
    (second,) = torch.autograd.grad(x.grad.sum(), [x])
    return [x.grad, second]


@scenario
def hessian_vector_product(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1))
    parameters = list(model.parameters())
    loss = model(torch.randn(run.size, 3)).square().mean()
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    vector = [torch.randn_like(item) for item in parameters]
    return torch.autograd.grad(first, parameters, grad_outputs=vector, allow_unused=True)


@scenario
def gradient_that_requires_gradient(run: Run) -> Any:
    x, v = leaf(run.size), leaf(run.size)
    (first,) = torch.autograd.grad(x.sinh(), [x], grad_outputs=[v], create_graph=True)
    return [first, *torch.autograd.grad(first.sum(), [x, v])]


@scenario
def inner_steps_of_meta_learning(run: Run) -> Any:
    weight = leaf(3, 2)
    x, y = torch.randn(run.size, 3), torch.randn(run.size, 2)
    fast = weight
    for _ in range(2):
        loss = (x @ fast - y).square().mean()
        (gradient,) = torch.autograd.grad(loss, [fast], create_graph=True)
        fast = fast - 0.1 * gradient
    (x @ fast - y).square().mean().backward()
    return [fast, weight.grad]


@scenario
def forces_and_a_loss_on_them(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 1)).double()
    positions = leaf(run.size, 3, dtype=torch.float64)
    energy = model(positions).sum()
    (slope,) = torch.autograd.grad(energy, [positions], create_graph=True)
    loss = energy.square() + (slope + 1).square().sum()
    loss.backward()
    return [loss, *grads(*model.parameters(), positions)]


@scenario
def convolution_twice(run: Run) -> Any:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)).double()
    x = leaf(run.size, 1, 4, 4, dtype=torch.float64)
    (slope,) = torch.autograd.grad(model(x).sum(), [x], create_graph=True)
    ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean().backward()
    return grads(*model.parameters())


@scenario
def second_derivative_of_inner_values(run: Run) -> Any:
    x = leaf(run.size)
    h = x.sin()
    y = (h * h * x).sum()
    by_h, by_x = torch.autograd.grad(y, [h, x], create_graph=True)
    run.note(by_h.requires_grad, by_x.requires_grad)
    return [by_h, by_x, *torch.autograd.grad(by_h.sum() + by_x.square().sum(), [x])]


@scenario
def gradient_that_is_constant(run: Run) -> Any:
    x = leaf(run.size)
    (first,) = torch.autograd.grad((x * 3).sum(), [x], create_graph=True)
    run.note(first.requires_grad)
    return first


@scenario
def hooks_with_create_graph(run: Run) -> Any:
    x = leaf(run.size)
    h = x.exp()
    h.register_hook(lambda g: run.note("tensor", torch.is_grad_enabled(), g.requires_grad) or g * g)
    h.grad_fn.register_hook(lambda outputs, inputs: run.note("node", *outputs, *inputs))
    (first,) = torch.autograd.grad((h * h).sum(), [x], create_graph=True)
    return [first, *torch.autograd.grad(first.sum(), [x])]


@scenario(eager="hooks of native code")
def retained_gradient_with_create_graph(run: Run) -> Any:
    x = leaf(run.size)
    h = x.exp()
    h.retain_grad()
    (first,) = torch.autograd.grad((h * h).sum(), [x], create_graph=True)
    return [first.detach(), h.grad, *torch.autograd.grad(h.grad.sum() + first.sum(), [x])]


@scenario
def post_accumulate_hook_with_create_graph(run: Run) -> Any:
    x = leaf(run.size)
    x.register_post_accumulate_grad_hook(lambda p: run.note(p.grad, p.grad.requires_grad, torch.is_grad_enabled()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x.pow(3).sum().backward(create_graph=True)
    return torch.autograd.grad(x.grad.sum(), [x])


@scenario
def written_view_twice(run: Run) -> Any:
    x, y = leaf(run.size, 3), leaf(run.size)
    base = x.sin()
    base[:, 1] = y.exp()
    first = torch.autograd.grad(base.pow(3).sum(), [x, y], create_graph=True)
    return [*first, *torch.autograd.grad(first[0].sum() + first[1].square().sum(), [x, y])]


@scenario(eager="saved-tensor hooks")
def checkpoint_twice(run: Run) -> Any:
    x = leaf(run.size)
    y = checkpoint(lambda v: v.sin().exp(), x, use_reentrant=False)
    (first,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
    return [first, *torch.autograd.grad(first.square().sum(), [x])]


class Once(torch.autograd.Function):
    """A function whose backward has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


@scenario
def once_differentiable_function(run: Run) -> Any:
    x = leaf(run.size)
    (first,) = torch.autograd.grad(Once.apply(x).sum(), [x], create_graph=True)
    try:
        first.sum().backward()
    except RuntimeError as error:
        run.note("once_differentiable" in str(error))
    return first.detach()


class Cubed(torch.autograd.Function):
    """A function whose backward saves what a derivative needs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


@scenario
def function_of_third_order(run: Run) -> Any:
    x = leaf(run.size, dtype=torch.float64)
    found = [Cubed.apply(x).sum()]
    for _ in range(3):
        found.append(torch.autograd.grad(found[-1].sum(), [x], create_graph=True)[0])
    return found[1:]


@scenario(eager="retain_graph=False")
def graph_not_kept_with_create_graph(run: Run) -> Any:
    x = leaf(run.size)
    y = x.exp().sum()
    (first,) = torch.autograd.grad(y, [x], create_graph=True, retain_graph=False)
    try:
        torch.autograd.grad(first.sum(), [x])
    except RuntimeError as error:
        run.note("second time" in str(error))
    return first.detach()


@scenario
def unused_input_with_create_graph(run: Run) -> Any:
    x, y = leaf(run.size), leaf(2)
    found = torch.autograd.grad(x.exp().sum(), [x, y], create_graph=True, allow_unused=True)
    zeros = torch.autograd.grad(x.exp().sum(), [x, y], create_graph=True, materialize_grads=True)
    return [*found, *zeros, *torch.autograd.grad(found[0].sum(), [x])]
