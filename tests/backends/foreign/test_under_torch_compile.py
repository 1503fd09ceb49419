"""A function compiled by Dovetail in a program that ``torch.compile`` compiles: the outer compiler takes the original."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

X = torch.tensor([1.0, -2.0, 3.0])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recorder:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def operators(self) -> list[str]:
        return [node.name for graph in self.graphs for node in graph.graph.nodes if node.op.startswith("call")]


def test_a_compiled_function_becomes_part_of_torchs_graph() -> None:
    weight = torch.nn.Parameter(X.clone())
    inner = dovetail.compile(lambda x: (x * weight).tanh(), backend="aten")
    recorder = Recorder()
    outer = torch.compile(lambda x: inner(x) + 1, backend=recorder, fullgraph=True)
    for _ in range(2):
        result = outer(X)
        same(result, (X * weight).tanh() + 1)
        same(torch.autograd.grad(result.sum(), weight), torch.autograd.grad((X * weight).tanh().sum(), weight))
    assert recorder.operators() == ["mul", "tanh", "add"] and not inner.entries


def test_a_compiled_function_that_was_called_before() -> None:
    inner = dovetail.compile(torch.sin, backend="aten")
    same(inner(X), X.sin())
    recorder = Recorder()
    same(torch.compile(lambda x: inner(x) * 2, backend=recorder, fullgraph=True)(X), X.sin() * 2)
    assert recorder.operators() == ["sin", "mul"] and len(inner.entries) == 1


def test_a_compiled_module_inside() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    inner = dovetail.compile(model, backend="aten")
    outer = torch.compile(lambda x: inner(x) * 2, backend=Recorder())
    for _ in range(2):
        result = outer(X)
        same(result, model(X) * 2)
        same(
            torch.autograd.grad(result.sum(), list(model.parameters())),
            torch.autograd.grad((model(X) * 2).sum(), list(model.parameters())),
        )


def test_a_backward_after_a_graph_break_is_not_captured_by_torch() -> None:
    graphs: list[torch.fx.GraphModule] = []
    backend = dovetail.torch_backend("aten", fullgraph=True)

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return backend(graph, inputs)

    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).sin().sum()
        torch._dynamo.graph_break()
        loss.backward()
        return weight.grad * 2

    outer = torch.compile(function, backend=counting)
    expected = function(X.clone().requires_grad_(), X + 1)
    names: list[str] = []
    from torch._dynamo import convert_frame

    call = convert_frame.ConvertFrame.__call__

    def watching(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(frame.f_code.co_filename)
        return call(self, frame, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_frame.ConvertFrame, "__call__", watching)
        same(outer(X.clone().requires_grad_(), X + 1), expected)
    assert len(graphs) == 2
    own = (str(Path(dovetail.__file__).parent), "<dovetail")
    assert names and not any(name.startswith(own) for name in names), names
