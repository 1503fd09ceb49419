"""A convolution and its gradient read one copy of an activation, and nobody can tell from the results."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import dovetail
from dovetail.backends.inductor import convolution_layouts
from dovetail.backends.inductor.convolution_layouts import lay_out_convolutions
from tests.differential import same


class Network(torch.nn.Module):
    """Two convolutions; what is between them is returned as well, or read by strides."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.second = torch.nn.Conv2d(8, 6, 3, padding=1, stride=2)

    def forward(self, x: torch.Tensor) -> Any:
        inner = torch.relu(self.norm(self.first(x)))
        if self.between == "pooled":
            inner = torch.nn.functional.max_pool2d(inner, 2)
        y = self.second(inner)
        if self.between == "returned":
            return y, inner
        if self.between == "by strides":
            return y, inner.as_strided((5, 7), (11, 3), 2).sin()
        return y, None


def trained(between: str, backend: str | None) -> list[Any]:
    torch.manual_seed(1)
    network = Network(between)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        y, other = network(x)
        y.square().mean().backward()
        optimizer.step()
        return y.detach(), None if other is None else other.detach()

    # With a graph from Inductor's cache no pass would run.
    run = (
        step
        if backend is None
        else dovetail.compile(step, backend=backend, backend_options={"fx_graph_cache": False}, fullgraph=True)
    )
    # The first call finds no state of the optimizer: its entry is used once, and gets no kernels.
    for seed in (0, 1):
        result = run(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)))
    return [result, [item.grad for item in network.parameters()], network.state_dict(), optimizer.state_dict()]


@pytest.mark.parametrize("between", ["pooled", "returned", "by strides"])
@pytest.mark.slow
def test_a_step_is_that_of_eager(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []

    def counting(node: torch.fx.Node) -> bool:
        moved.append(may_move(node))
        return moved[-1]

    may_move = convolution_layouts._may_move
    monkeypatch.setattr(convolution_layouts, "_may_move", counting)
    actual = trained(between, "inductor")
    same(trained(between, None), actual, "the step", exact=False)
    assert moved, "Inductor did not run the pass"
    if torch.backends.mkldnn.is_available():
        assert any(moved)


def graph_with(user: Any, *arguments: Any) -> tuple[torch.fx.Graph, torch.fx.Node]:
    """A convolution and its gradient, and another reader of what both read."""
    graph = torch.fx.Graph()
    values = [torch.empty(2, 3, 4, 4), torch.empty(5, 3, 1, 1), torch.empty(2, 5, 4, 4)]
    x, weight, gradient = (graph.placeholder(name) for name in ("x", "weight", "gradient"))
    for node, value in zip((x, weight, gradient), values, strict=True):
        node.meta["val"] = value
    inner = graph.call_function(torch.ops.aten.relu.default, (x,))
    inner.meta["val"] = values[0].clone()
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    y = graph.call_function(torch.ops.aten.convolution.default, (inner, weight, None, *settings))
    mask = [False, True, False]
    z = graph.call_function(
        torch.ops.aten.convolution_backward.default, (gradient, inner, weight, None, *settings, mask)
    )
    other = inner if user is None else graph.call_function(user, (inner, *arguments))
    graph.output([y, z, other])
    torch.fx.GraphModule(torch.nn.Module(), graph)
    return graph, inner


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="Inductor leaves channels first without oneDNN")
@pytest.mark.parametrize(
    ("user", "arguments", "moves"),
    [
        (torch.ops.aten.sin.default, (), True),
        (torch.ops.aten.sum.default, (), True),
        (torch.ops.aten.as_strided.default, ([3], [5]), False),
        (torch.ops.aten.sort.default, (), False),
        (None, (), False),
    ],
)
def test_only_what_is_read_by_elements_is_moved(user: Any, arguments: tuple[Any, ...], moves: bool) -> None:
    graph, inner = graph_with(user, *arguments)
    lay_out_convolutions(graph)
    expected = (48, 1, 12, 3) if moves else (48, 16, 4, 1)
    assert inner.meta["val"].stride() == expected


@pytest.mark.slow
def test_pooling_is_decomposed_in_a_process_that_has_compiled_nothing() -> None:
    program = """
import torch
from dovetail.backends.inductor.decompositions import wanted_decompositions
pool = torch.ops.aten.max_pool2d_with_indices.default
print(len(wanted_decompositions()[pool](torch.ones(1, 1, 4, 4), [2, 2])))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
