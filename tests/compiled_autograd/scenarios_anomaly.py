"""Backward scenarios in anomaly mode: which operator failed or made a NaN, and the forward's line behind it."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.compiled_autograd.scenarios import Run, grads, leaf, scenario


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
        if issubclass(item.category, UserWarning) and "Error detected" in str(item.message):
            lines = re.sub(r"\(Triggered internally at .*\)", "", str(item.message)).strip().splitlines()
            # Between them are the lines of the test, which are others in eager.
            run.note(lines[0], lines[-2:])


@scenario
def nan_of_an_operator(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        h = (x * 0).sqrt()
        h.mul(0).sum().backward()
    return grads(x)


@scenario
def nan_in_the_second_output(run: Run) -> Any:
    x, y = leaf(run.size), torch.zeros(run.size).requires_grad_()
    with watched(run):
        (torch.pow(x.abs(), y - 1) * 0 / y).sum().backward()
    return grads(x, y)


@scenario
def leaves_before_the_nan_have_their_gradients(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    h = (x * 0).sqrt()
    k = y.sin()
    with watched(run):
        (h * 0 * k).sum().backward()
    return grads(x, y)


@scenario
def nan_without_the_check(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run, check_nan=False):
        (x * 0).sqrt().mul(0).sum().backward()
    return x.grad.isnan()


@scenario
def forward_outside_of_anomaly_mode(run: Run) -> Any:
    x = leaf(run.size)
    y = (x * 0).sqrt().mul(0).sum()
    with watched(run):
        y.backward()
    return grads(x)


@scenario
def nothing_wrong_in_anomaly_mode(run: Run) -> Any:
    x = leaf(run.size, 3)
    seen = []
    with watched(run):
        h = checkpoint(lambda v: v.sin() * v, x, use_reentrant=False)
        h.register_hook(lambda gradient: seen.append(torch.is_anomaly_enabled()))
        (h.exp() + x).sum().backward()
        run.note(torch.is_anomaly_enabled(), *seen)
    return grads(x)


@scenario
def nan_of_a_hook_on_a_node(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        h = x.sin()
        h.grad_fn.register_hook(lambda outputs, inputs: (outputs[0] * float("nan"),))
        h.sum().backward()
    return grads(x)


@scenario
def nan_that_a_hook_removes(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        h = (x * 0).sqrt()
        h.grad_fn.register_hook(lambda outputs, inputs: (outputs[0].nan_to_num(),))
        h.mul(0).sum().backward()
    return grads(x)


@scenario
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


@scenario
def nan_of_a_function(run: Run) -> Any:
    x = leaf(run.size)
    with watched(run):
        y = Wrong.apply(x.exp())
        y.sum().backward()
    return grads(x)


@scenario
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
