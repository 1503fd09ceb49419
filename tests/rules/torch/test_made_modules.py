"""Modules that the program makes at its first call and keeps: that call runs eagerly, the later ones in one graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.modules.lazy import LazyModuleMixin

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import same


class Lazy(torch.nn.Module):
    """Makes a layer at its first call, when it sees how wide the data is."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.second: torch.nn.Linear | None = None
        self.always = always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.second is None or self.always:
            self.second = torch.nn.Linear(4, 2)
            torch.nn.init.ones_(self.second.weight)
        result: torch.Tensor = self.second(self.first(x))
        return result.sum()


def step(model: torch.nn.Module, run: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    loss = run(x)
    loss.backward()
    return [loss.detach(), *[parameter.grad for parameter in model.parameters()]]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_the_first_call_makes_the_module_and_later_ones_are_one_graph(fullgraph: bool) -> None:
    model = Lazy()
    twin = copy.deepcopy(model)
    compiled = dovetail.compile(twin, backend="aten", fullgraph=fullgraph)
    for size in (2, 3, 5, 7):
        x = torch.randn(size, 3)
        same(step(model, model, x), step(twin, compiled, x), exact=True)
    names = [event.name for event in dovetail.events_of(compiled).events]
    assert names.count("initialisation") == 1
    assert "graph break" not in names
    assert len(compiled.compiled_call.entries) == 2


def test_a_module_made_at_every_call_is_refused_in_one_graph() -> None:
    compiled = dovetail.compile(Lazy(always=True), backend="aten", fullgraph=True)
    compiled(torch.randn(2, 3))
    with pytest.raises(GraphBreakError, match="Linear made by the function leaves it"):
        compiled(torch.randn(2, 3))


class Centred(LazyModuleMixin, torch.nn.Module):
    """Makes a parameter of the shape of what its first call is given, without a placeholder before."""

    def initialize_parameters(self, x: torch.Tensor) -> None:
        self.centre = torch.nn.Parameter(torch.rand(x.shape[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.centre).square().sum()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_lazy_module_without_placeholders_is_one_graph_after_its_first_call(fullgraph: bool) -> None:
    model, twin = torch.nn.Sequential(Centred()), torch.nn.Sequential(Centred())
    compiled = dovetail.compile(twin, backend="aten", fullgraph=fullgraph)
    for _ in range(3):
        x = torch.randn(2, 3)
        same(step(model, model, x), step(twin, compiled, x), exact=True)
    names = [event.name for event in dovetail.events_of(compiled).events]
    assert names.count("initialisation") == 1 and "graph break" not in names
