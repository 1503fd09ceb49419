"""Backward scenarios in anomaly mode: which operator failed or made a NaN, and the forward's line behind it."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.backward_capture.scenarios import Run, grads, leaf, scenario


@contextlib.contextmanager
def watched(run: Run, check_nan: bool = True, what: type[Exception] = RuntimeError) -> Iterator[None]:
    """Anomaly mode; the warnings' words and the error's are noted."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        try:
            with torch.autograd.set_detect_anomaly(True, check_nan):
                yield
        except what as error:
            run.note(str(error))
    for item in record:
        message = str(item.message)
        if issubclass(item.category, UserWarning) and (
            "Error detected" in message or "Previous calculation" in message
        ):
            lines = re.sub(r"\(Triggered internally at .*\)", "", message).strip().splitlines()
            # Between them are the lines of the test, which are others in eager, and of torch's own way to the engine.
            place = max((index for index, line in enumerate(lines) if __file__ in line), default=None)
            run.note(lines[0], lines[-1:] if place is None else lines[place : place + 2])


@scenario(eager="anomaly mode")
def nan_of_an_operator(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        h = (x * 0).sqrt()
        h.mul(0).sum().backward()
    return grads(x)


@scenario(eager="anomaly mode")
def nan_in_the_second_output(run: Run) -> Any:
    x, y = leaf(run.size), torch.zeros(run.size).requires_grad_()
    with watched(run):
        (torch.pow(x.abs(), y - 1) * 0 / y).sum().backward()
    return grads(x, y)


@scenario(eager="anomaly mode")
def leaves_before_the_nan_have_their_gradients(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    h = (x * 0).sqrt()
    k = y.sin()
    with watched(run):
        (h * 0 * k).sum().backward()
    return grads(x, y)


@scenario(eager="anomaly mode")
def nan_without_the_check(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run, check_nan=False):
        (x * 0).sqrt().mul(0).sum().backward()
    return x.grad.isnan()


@scenario(eager="anomaly mode")
def forward_outside_of_anomaly_mode(run: Run) -> Any:
    x = leaf(run.size)
    y = (x * 0).sqrt().mul(0).sum()
    with watched(run):
        y.backward()
    return grads(x)


@scenario(eager="anomaly mode")
def nothing_wrong_in_anomaly_mode(run: Run) -> Any:
    x = leaf(run.size, 3)
    seen = []
    with watched(run):
        h = checkpoint(lambda v: v.sin() * v, x, use_reentrant=False)
        h.register_hook(lambda gradient: seen.append(torch.is_anomaly_enabled()))
        (h.exp() + x).sum().backward()
        run.note(torch.is_anomaly_enabled(), *seen)
    return grads(x)


@scenario(eager="anomaly mode")
def nan_of_a_hook_on_a_node(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        h = x.sin()
        h.grad_fn.register_hook(lambda outputs, inputs: (outputs[0] * float("nan"),))
        h.sum().backward()
    return grads(x)


@scenario(eager="anomaly mode")
def nan_that_a_hook_removes(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        h = (x * 0).sqrt()
        h.grad_fn.register_hook(lambda outputs, inputs: (outputs[0].nan_to_num(),))
        h.mul(0).sum().backward()
    return grads(x)


@scenario(eager="anomaly mode")
def error_of_a_hook_in_anomaly_mode(run: Run) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        raise ValueError("no")

    x = leaf(run.size)
    with watched(run, what=ValueError):
        h = x.sin()
        h.register_hook(hook)
        (h * 2).sum().backward()
    return grads(x)


class Wrong(torch.autograd.Function):
    """A function whose backward makes a NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 0 - gradient / 0


class Right(torch.autograd.Function):
    """A function whose backward can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


@scenario(eager="anomaly mode")
def nan_of_a_function(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        y = Wrong.apply(x.exp())
        y.sum().backward()
    return grads(x)


@scenario(eager="anomaly mode")
def saved_value_was_written_to_in_anomaly_mode(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        h = x.exp()
        k = h.sin()

        def hook(gradient: torch.Tensor) -> None:
            with torch.no_grad():
                h.mul_(2)

        k.register_hook(hook)
        try:
            k.sum().backward()
        except RuntimeError as error:
            run.note("modified by an inplace operation" in str(error))
    return grads(x)


@scenario(eager="anomaly mode")
def second_derivative_in_anomaly_mode(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        (first,) = torch.autograd.grad((x * 0 + 1).sqrt().sum(), [x], create_graph=True)
        ((first - first.detach()).sqrt() * 0).sum().backward()
    return [first.detach(), x.grad]


@scenario(eager="anomaly mode")
def nan_of_the_second_derivative(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        (first,) = torch.autograd.grad((x * 0 + 1).sqrt().sum() + x.exp().sum(), [x], create_graph=True)
        (second,) = torch.autograd.grad((first - first.detach()).abs().sum(), [x], create_graph=True)
        ((second * 0).sqrt() * 0).sum().backward()
    return grads(x)


@scenario(eager="anomaly mode")
def induced_by_an_operator_of_the_first_backward(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        h = (x * 0).sin()
        (first,) = torch.autograd.grad(h.pow(1.5).sum(), [x], create_graph=True)
        run.note(torch.is_anomaly_enabled())
        # The derivative of the square root at zero, which the first backward has taken.
        (first * x).sum().backward()
    return grads(x)


@scenario(eager="anomaly mode")
def induced_by_an_operator_of_the_second_backward(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        found = (x * 0).pow(2.5).sum()
        for _ in range(2):
            (found,) = torch.autograd.grad(found.sum(), [x], create_graph=True)
        found.exp().sum().backward()
    return grads(x)


@scenario(eager="anomaly mode")
def nothing_wrong_twice_in_anomaly_mode(run: Run) -> Any:
    x, weight = leaf(run.size, 3), leaf(3, 3)
    seen = []
    with watched(run):
        h = checkpoint(lambda v: (v @ weight).sin() * v, x, use_reentrant=False)
        h.register_hook(lambda gradient: seen.append(torch.is_anomaly_enabled()))
        (first,) = torch.autograd.grad((h.exp() + Right.apply(h)).sum(), [x], create_graph=True)
        first.square().sum().backward()
        run.note(torch.is_anomaly_enabled(), *seen)
    return [first.detach(), *grads(x, weight)]


@scenario(eager="anomaly mode")
def nan_of_a_function_in_its_second_derivative(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        (first,) = torch.autograd.grad(Right.apply((x * 0).sqrt() + x).sum(), [x], create_graph=True)
        first.sum().backward()
    with watched(run):
        (first,) = torch.autograd.grad(Right.apply(x * 0).sum(), [x], create_graph=True)
        first.sqrt().sum().backward()
    return grads(x)
