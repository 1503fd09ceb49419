"""Derivatives of higher order through hooks that the function registers on its own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import HigherOrderGradientError
from tests.differential import same

Tensor = torch.Tensor
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {}


def program(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    PROGRAMS[function.__name__] = function
    return function


@program
def reads_values_of_the_forward(x: Tensor) -> Tensor:
    y, k = x.sin(), x.cos()
    y.register_hook(lambda g: g * k + y)
    return (y * y * k).sum()


@program
def without_gradients(x: Tensor) -> Tensor:
    y, k = x.sin(), x.cos()

    @torch.no_grad()
    def hook(g: Tensor) -> Tensor:
        return g * k + y

    y.register_hook(hook)
    return (y * y * k).sum()


@program
def without_gradients_in_part(x: Tensor) -> Tensor:
    y, k = x.sin(), x.cos()

    def hook(g: Tensor) -> Tensor:
        first = g * y
        with torch.no_grad():
            second = g * k
        return first * k + second

    y.register_hook(hook)
    return (y * y * k).sum()


@program
def cut_off(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda g: g.detach() * y)
    return (y**3).sum()


@program
def several(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda g: g * 2)
    z = y.exp()
    z.register_hook(hook=lambda g: g.clamp(max=0.9))
    y.register_hook(lambda g: g + 1)
    return (y * z).sum()


@program
def removed_at_once(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda g: g * 2).remove()
    return (y**3).sum()


@program
def a_variable_that_is_bound_later(x: Tensor) -> Tensor:
    for number in range(3):
        x = x.sin()
        x.register_hook(lambda g, number=number: g * (number + 1) * x.detach())
    return x.sum()


@program
def only_looks(x: Tensor) -> Tensor:
    y, seen = x.sin(), []
    y.register_hook(lambda g: seen.append(g))
    return (y**3).sum()


def derivatives(run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    found = [run(x)]
    for _ in range(2):
        found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
    return [value.detach() for value in found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_orders_are_eagers(name: str) -> None:
    compiled = dovetail.compile(PROGRAMS[name], backend="aten", fullgraph=True)
    for _ in range(2):
        x = torch.linspace(0.1, 1, 3, dtype=torch.float64).requires_grad_()
        same(derivatives(PROGRAMS[name], x), derivatives(compiled, x), exact=False)


def test_a_hook_that_asks_for_sizes_that_change() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: g / g.shape[0] + g.reshape(-1, g.shape[0])[0])
        return (y**3).sum()

    compiled = dovetail.compile(function, backend="aten", dynamic=True)
    for size in (3, 4):
        x = torch.linspace(0.1, 1, size, dtype=torch.float64).requires_grad_()
        same(derivatives(function, x), derivatives(compiled, x), exact=False)


def test_a_hook_that_reads_a_parameter() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3).double()

    def function(x: Tensor) -> Tensor:
        hidden = layer(x).tanh()
        hidden.register_hook(lambda g: g * layer.bias.sigmoid())
        return hidden.square().sum()

    outcomes: list[Any] = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        layer.zero_grad()
        x = torch.linspace(0.1, 1, 3, dtype=torch.float64).requires_grad_()
        (slope,) = torch.autograd.grad(run(x), x, create_graph=True)
        slope.square().sum().backward()
        outcomes.append([x.grad, layer.weight.grad, layer.bias.grad])
    same(*outcomes, exact=False)


def test_a_backend_that_replays_the_program_has_the_hook() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: g * x.cos())
        return (y**3).sum()

    x = torch.ones(3, requires_grad=True)
    compiled = dovetail.compile(function, backend="eager", fullgraph=True)
    same(derivatives(function, x), derivatives(compiled, x))


@pytest.mark.parametrize("reason", ["random", "inside"])
def test_what_no_replay_can_do_again_is_refused(reason: str) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: g * torch.rand(3) if reason == "random" else g * 2)
        if reason == "inside":
            y = y * torch.autograd.grad((y**3).sum(), x, create_graph=True)[0]
        return y.sum()

    x = torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad(dovetail.compile(function, backend="aten")(x), x, create_graph=True)
    with pytest.raises(HigherOrderGradientError, match=reason):
        torch.autograd.grad(slope.sum(), x)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_tensor_without_gradient_raises_where_it_is_registered(method: str) -> None:
    """What the program did before is done, and it can catch the error."""
    outcomes = []
    for backend in (None, "aten"):
        log: list[Any] = []

        def program(x: torch.Tensor, catches: bool, log: list[Any] = log) -> torch.Tensor:
            log.append(catches)
            try:
                getattr(x, method)(log.append)
            except RuntimeError as error:
                log.append(str(error))
                if not catches:
                    raise
            return x * 2

        run = program if backend is None else dovetail.compile(program, backend=backend)
        for catches in (False, True, False):
            try:
                log.append(run(torch.ones(2), catches).tolist())
            except RuntimeError as error:
                log.append(str(error))
        outcomes.append(log)
    assert outcomes[0] == outcomes[1]
