"""Hooks of parameters of a graph with several results, of which only some have a gradient: called where eager calls them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

pytestmark = pytest.mark.usefixtures("quiet")


class TwoHeads(torch.nn.Module):
    """One parameter for each result, and one for both."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.first, self.second = (torch.nn.Parameter(torch.full((3,), value)) for value in (0.5, 1.5, 2.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = (x * self.both).sin()
        return features * self.first, features * self.second


Register = Callable[[torch.nn.Module, list[Any]], Any]


def _hooks(model: torch.nn.Module, log: list[Any]) -> Any:
    def hook(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda gradient: (log.append((name, gradient.clone())), gradient * 2)[1]

    return [item.register_hook(hook(name)) for name, item in model.named_parameters()]


def _after_accumulation(model: torch.nn.Module, log: list[Any]) -> Any:
    def hook(name: str) -> Callable[[torch.Tensor], None]:
        return lambda parameter: log.append((name, parameter.grad.clone()))  # type: ignore[union-attr]

    return [item.register_post_accumulate_grad_hook(hook(name)) for name, item in model.named_parameters()]


def _steps_in_the_backward(model: torch.nn.Module, log: list[Any]) -> Any:
    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
        parameter.grad = None

    return [item.register_post_accumulate_grad_hook(step) for item in model.parameters()]


def _together(model: torch.nn.Module, log: list[Any]) -> Any:
    parameters = list(model.parameters())
    return [torch.autograd.graph.register_multi_grad_hook(parameters, lambda found: log.append(len(found)))]


def _both_kinds(model: torch.nn.Module, log: list[Any]) -> Any:
    return _hooks(model, log) + _after_accumulation(model, log)


def _train(register: Register, compile: Callable[[Any], Any]) -> Any:
    model, log = TwoHeads(), []
    run, handles = compile(model), register(model, log)
    for step, heads in enumerate([(0,), (1,), (0, 1), (1,), (0,)]):
        results = run(torch.arange(3.0) + step)
        sum(results[head].sum() for head in heads).backward()
        if step == 3:
            handles.pop().remove()
    return log, list(model.parameters()), [item.grad for item in model.parameters()]


@pytest.mark.parametrize("register", [_hooks, _after_accumulation, _steps_in_the_backward, _both_kinds, _together])
def test_hooks_of_what_has_no_gradient_are_not_called(register: Register) -> None:
    expected = _train(register, lambda model: model)
    found = _train(register, lambda model: dovetail.compile(model, backend="aten"))
    same(expected[1:], found[1:])
    # Parameters that are reached by one node have their hooks called in another order.
    assert sorted(map(str, expected[0])) == sorted(map(str, found[0]))


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("place", ["inside", "behind a break", "after the call"])
def test_hooks_that_are_registered_later_are_not_called_without_a_gradient(method: str, place: str) -> None:
    def train(compile: Callable[[Any], Any]) -> Any:
        weight, log = torch.ones(3, requires_grad=True), []

        def program(x: torch.Tensor) -> Any:
            results = x.sin(), weight * 2
            if place == "behind a break":
                torch._dynamo.graph_break()
            if place != "after the call":
                getattr(weight, method)(lambda item: log.append(item.clone()))
            return results

        run = compile(program)
        for head in (0, 1, 0):
            results = run(torch.ones(3, requires_grad=True))
            if place == "after the call":
                getattr(weight, method)(lambda item: log.append(item.clone()))
            results[head].sum().backward()
        return log, weight.grad

    same(train(lambda function: function), train(lambda function: dovetail.compile(function, backend="aten")))


def test_hooks_in_a_captured_backward_are_not_called_without_a_gradient() -> None:
    def train(compile: Callable[[Any], Any], around: Callable[[], Any]) -> Any:
        model, log = TwoHeads(), []
        run = compile(model)
        _hooks(model, log)
        for step, head in enumerate((0, 1, 0)):
            results = run(torch.arange(3.0) + step)
            with around():
                results[head].sum().backward()
        return sorted(map(str, log)), [item.grad for item in model.parameters()]

    expected = train(lambda model: model, contextlib.nullcontext)
    captured = functools.partial(dovetail.compiled_autograd, backend="aten")
    same(expected, train(lambda model: dovetail.compile(model, backend="aten"), captured))


def test_a_hook_of_a_tensor_that_was_computed_before() -> None:
    def train(compile: Callable[[Any], Any]) -> Any:
        run, log = compile(lambda x, y: (x.sin(), y.cos())), []
        for head in (0, 1, 0):
            leaf = torch.ones(2, requires_grad=True)
            x, y = leaf * 2, leaf * 3
            x.register_hook(lambda gradient: gradient * 2)
            y.register_hook(lambda gradient: log.append(gradient.clone()))
            run(x, y)[head].sum().backward()
            log.append(leaf.grad)
        return log

    same(train(lambda function: function), train(lambda function: dovetail.compile(function, backend="aten")))


def test_the_hooks_go_on_in_eager() -> None:
    model, log = TwoHeads(), []
    _both_kinds(model, log)
    dovetail.compile(model, backend="aten")(torch.ones(3))[0].sum().backward()
    log.clear()
    model(torch.ones(3))[1].sum().backward()
    assert sorted(name for name, _ in log) == ["both", "both", "second", "second"]
