"""Lists that the caller passes to ``torch.autograd.grad`` and ``backward``: outputs, inputs, incoming gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


def incoming_gradients(x: torch.Tensor, tangents: list[torch.Tensor]) -> Any:
    return torch.autograd.grad(torch.sin(x), x, grad_outputs=tangents)


def two_incoming_gradients(x: torch.Tensor, tangents: list[torch.Tensor]) -> Any:
    return torch.autograd.grad([torch.sin(x), x.exp().sum()], [x], [tangents[0], None])


def backward_from_a_list(x: torch.Tensor, tangents: list[torch.Tensor]) -> Any:
    y = x.detach().clone().requires_grad_()
    torch.autograd.backward([y.sin()] * len(tangents), tangents)
    return y.grad


def in_a_dictionary(x: torch.Tensor, tangents: list[torch.Tensor]) -> Any:
    kept = {"first": tuple(tangents)}
    return torch.autograd.grad([x.sin()] * len(tangents), x, kept["first"], create_graph=True)


@pytest.mark.parametrize("program", [incoming_gradients, two_incoming_gradients, backward_from_a_list, in_a_dictionary])
def test_incoming_gradients(program: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.linspace(-1, 1, 3).requires_grad_()
    lists = [[torch.ones(3)], [torch.full((3,), 2.0)]]
    if program is not incoming_gradients:
        lists += [[torch.ones(3), torch.arange(3.0)], [torch.arange(3.0)]]
    for tangents in lists:
        same(program(x, tangents), compiled(x, tangents))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)


@pytest.mark.parametrize("options", [{"allow_unused": True}, {"materialize_grads": True}], ids=str)
def test_parameters_that_the_forward_never_reads(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model()

    def program(x: torch.Tensor, parameters: list[torch.Tensor]) -> Any:
        return torch.autograd.grad(model.used(x).square().sum(), parameters, **options)

    def of_the_model(x: torch.Tensor, parameters: list[torch.Tensor]) -> Any:
        return torch.autograd.grad(model.used(x).square().sum(), list(model.parameters()), **options)

    everything = list(model.parameters())
    for function in (program, of_the_model):
        compiled = dovetail.compile(function, backend="aten", fullgraph=True)
        for parameters in (everything, everything[:3], everything[::-1], everything[2:]):
            same(function(torch.ones(3, 2), parameters), compiled(torch.ones(3, 2), parameters))


def test_another_list_is_another_question() -> None:
    x, y = torch.linspace(0, 1, 3).requires_grad_(), torch.linspace(1, 2, 3).requires_grad_()

    def of_outputs(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        return torch.autograd.grad([item.sin().sum() for item in outputs], inputs, allow_unused=True)

    def of_values(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        values = [item * item for item in inputs]
        return torch.autograd.grad([value.sum() for value in values], inputs)

    for function in (of_outputs, of_values):
        compiled = dovetail.compile(function, backend="aten", fullgraph=True)
        for outputs, inputs in (([x, y], [x]), ([x, y], [x, y]), ([x, y], [y]), ([y], [y, x]), ([x, y], [x])):
            same(function(outputs, inputs), compiled(outputs, inputs))
