"""Backward scenarios that go wrong, or change under the backward: eager's error, and the next step works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.backward_capture.scenarios import Run, grads, leaf, scenario


def attempt(run: Run, function: Callable[[], Any], *, words: int = 400) -> None:
    """Run something that raises, and note the error."""
    try:
        function()
    except Exception as error:
        run.note(type(error).__name__, str(error)[:words])
    else:
        run.note("no error")


@scenario
def parameters_added_between_steps(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(run.size, 3)).square().sum().backward()
        optimizer.step()
        if step < 2:
            layer = nn.Linear(4, 4)
            model.append(layer)
            optimizer.add_param_group({"params": layer.parameters()})
    return list(model.parameters())


@scenario
def function_with_two_backwards(run: Run) -> Any:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * 2

        vjp = backward

    x = leaf(run.size)
    attempt(run, lambda: Both.apply(x).sum().backward())
    x.sin().sum().backward()
    return grads(x)


@scenario
def function_that_raises(run: Run) -> Any:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
            ctx.fails = fails
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            if ctx.fails:
                raise KeyError("not there")
            return gradient * 2, None

    x, y = leaf(run.size), leaf(run.size)
    for fails in (True, False, True):
        attempt(run, lambda fails=fails: (Fails.apply(x.sin(), fails) * y).sum().backward())
    return grads(x, y)


@scenario
def post_accumulate_hook_that_raises(run: Run) -> Any:
    def fail(parameter: torch.Tensor) -> None:
        raise ValueError("after it was added")

    x, y = leaf(run.size), leaf(run.size)
    handle = x.register_post_accumulate_grad_hook(fail)
    attempt(run, lambda: (x * y).sum().backward())
    handle.remove()
    run.note(*(item is None for item in grads(x, y)))
    (x * y).sum().backward()
    return grads(x, y)


@scenario
def leaf_is_frozen_by_a_hook(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    h = x.sin()
    h.register_hook(lambda gradient: run.note(y.requires_grad_(False).requires_grad))
    (h * y.exp()).sum().backward()
    y.requires_grad_(True)
    (h.detach() * y).sum().backward()
    return grads(x, y)


@scenario
def hook_gives_another_type(run: Run) -> Any:
    x = leaf(run.size)
    h = x.sin()
    handle = h.register_hook(lambda gradient: gradient.double())
    attempt(run, lambda: h.sum().backward())
    handle.remove()
    x.sin().sum().backward()
    return grads(x)


@scenario
def gradient_of_the_wrong_shape(run: Run) -> Any:
    x = leaf(run.size)
    y = x.sin()
    attempt(run, lambda: y.backward(torch.ones(run.size + 2)))
    attempt(run, lambda: x.sin().backward())
    y.backward(torch.ones(run.size))
    return grads(x)


@scenario
def hook_writes_to_a_gradient_that_others_get(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    h = x + y
    h.register_hook(lambda gradient: gradient.mul_(3))
    k = x - y
    k.register_hook(lambda gradient: gradient.add_(1))
    (h * 2 + k * 3).sum().backward()
    return grads(x, y)


@scenario
def wrong_number_of_gradients(run: Run) -> Any:
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient[:1], gradient

    x = leaf(run.size)
    attempt(run, lambda: Two.apply(x).sum().backward())
    x.sin().sum().backward()
    return grads(x)


@scenario
def keyboard_interrupt_in_a_hook(run: Run) -> Any:
    def stop(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    x = leaf(run.size)
    h = x.sin()
    h.register_hook(stop)
    try:
        h.sum().backward()
    except KeyboardInterrupt:
        run.note("stopped")
    x.sin().sum().backward()
    return grads(x)
