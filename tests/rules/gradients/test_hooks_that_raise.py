"""Hooks of leaves that raise: which hooks have run by then, which gradients were added, and that the next step works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.errors import EagerFallbackWarning, GraphBreakWarning
from tests.differential import same
from tests.passes.test_whole_step import gradients


class Network(nn.Module):
    """Three layers, one of them used twice, and a weight that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.middle(self.first(x).tanh()).sin()) * 2) * self.scale


def _forward_only(model: Network, compiled: bool) -> Callable[[torch.Tensor], None]:
    forward = dovetail.compile(model, backend="aten") if compiled else model
    return lambda x: forward(x).square().mean().backward()


def _whole_step(model: Network, compiled: bool) -> Callable[[torch.Tensor], None]:
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    return dovetail.compile(step, backend="aten") if compiled else step


def _broken_forward(model: Network, compiled: bool) -> Callable[[torch.Tensor], None]:
    def step(x: torch.Tensor) -> None:
        hidden = model.first(x).tanh()
        print(end="")
        hidden = model.middle(model.middle(hidden).sin())
        print(end="")
        (model.last(hidden) * model.scale).square().mean().backward()

    return dovetail.compile(step, backend="aten") if compiled else step


def _session(model: Network, compiled: bool) -> Callable[[torch.Tensor], None]:
    def step(x: torch.Tensor) -> None:
        if not compiled:
            return model(x).square().mean().backward()
        with dovetail.compiled_autograd(backend="aten"):
            return model(x).square().mean().backward()

    return step


def _session_over_compiled(model: Network, compiled: bool) -> Callable[[torch.Tensor], None]:
    forward = dovetail.compile(model, backend="aten") if compiled else model

    def step(x: torch.Tensor) -> None:
        if not compiled:
            return forward(x).square().mean().backward()
        with dovetail.compiled_autograd(backend="aten"):
            return forward(x).square().mean().backward()

    return step


PROGRAMS = {
    "compiled forward": _forward_only,
    "whole step": _whole_step,
    "forward in pieces": _broken_forward,
    "compiled autograd": _session,
    "compiled autograd over a compiled forward": _session_over_compiled,
}


def _leaf_node(parameter: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(parameter).node


KINDS: dict[str, Callable[[torch.Tensor, Any, Callable[..., None]], Any]] = {
    "tensor": lambda parameter, node, hook: parameter.register_hook(lambda gradient: hook()),
    "before the node": lambda parameter, node, hook: node.register_prehook(lambda gradients: hook()),
    "behind the node": lambda parameter, node, hook: node.register_hook(lambda results, gradients: hook()),
    "after adding": lambda parameter, node, hook: parameter.register_post_accumulate_grad_hook(lambda _: hook()),
}


def run(program: str, kind: str, compiled: bool) -> list[Any]:
    """Let the hook of each parameter raise in turn, with a step that works after each."""
    model = Network()
    parameters = dict(model.named_parameters())
    nodes = {name: _leaf_node(parameter) for name, parameter in parameters.items()}
    step = PROGRAMS[program](model, compiled)
    found: list[Any] = []
    for index, failing in enumerate(parameters):
        called: list[str] = []

        def hook_of(name: str, failing: str = failing, called: list[str] = called) -> Callable[[], None]:
            def hook() -> None:
                called.append(name)
                if name == failing:
                    raise ValueError(f"{name} does not like it")

            return hook

        handles = [KINDS[kind](parameters[name], nodes[name], hook_of(name)) for name in parameters]
        x = torch.arange(6.0).view(2, 3) + index
        with pytest.raises(ValueError, match="does not like it") as error:
            step(x)
        found += [str(error.value), called, gradients(parameters.values())]
        for handle in handles:
            handle.remove()
        step(x)
        found.append(gradients(parameters.values()))
        if index % 2:
            model.zero_grad()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.sampled(12)
def test_what_was_added_before_the_error_is_eagers(program: str, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        warnings.simplefilter("ignore", EagerFallbackWarning)
        same(run(program, kind, False), run(program, kind, True), program)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["before the node", "behind the node"])
@pytest.mark.parametrize("is_held", [False, True])
def test_hooks_on_the_node_of_a_leaf_are_seen_from_the_next_call_on(kind: str, is_held: bool) -> None:
    """They were not where an autograd graph held the node."""
    outcomes = []
    for compiles in (False, True):
        weight = torch.nn.Parameter(torch.ones(3))
        held = (weight * 2).sum() if is_held else _leaf_node(weight)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x: torch.Tensor, weight: Any = weight, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            (weight * x).sin().sum().backward()
            optimizer.step()

        run_step = dovetail.compile(step, backend="aten") if compiles else step
        called: list[int] = []
        found = []
        for number in range(5):
            if number == 2:
                handle = KINDS[kind](weight, _leaf_node(weight), lambda called=called: called.append(1))
            if number == 4:
                handle.remove()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GraphBreakWarning)
                run_step(torch.full((3,), float(number)))
            found.append((len(called), weight.detach().clone(), weight.grad))
        outcomes.append((found, held is not None))
    same(*outcomes)
