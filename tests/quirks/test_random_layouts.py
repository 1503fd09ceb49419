"""Random numbers drawn into tensors that are not dense: eager's numbers, and eager's generator afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError

Cut = Callable[[torch.Tensor], torch.Tensor]
CUTS: dict[str, Cut] = {
    "transposed": lambda x: x.t(),
    "block": lambda x: x[1:6, 1:6],
    "transposed block": lambda x: x.t()[1:7, 2:6],
    "every second column": lambda x: x[:, ::2],
    "column": lambda x: x[:, 1],
    "diagonal": lambda x: x.diagonal(),
    "permuted": lambda x: x.view(2, 4, 8).permute(2, 0, 1),
    "permuted with gaps": lambda x: x.view(2, 4, 8).permute(2, 0, 1)[:, :, 1:3],
}
DRAWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "bernoulli_": lambda x: x.bernoulli_(0.4),
    "bernoulli_ by tensor": lambda x: x.bernoulli_(x * 0 + 0.3),
    "exponential_": lambda x: x.exponential_(),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.5),
    "random_": lambda x: x.random_(0, 7),
    "dropout_": lambda x: torch.nn.functional.dropout(x.add_(1), 0.5, True, True),
    "init.normal_": lambda x: torch.nn.init.normal_(x.detach()),
    "init.trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x.detach()),
    "randn out": lambda x: torch.randn(x.shape, out=x),
    "normal out": lambda x: torch.normal(0.0, 1.0, x.shape, out=x),
    "rand out": lambda x: torch.rand(x.shape, out=x),
}


def check(draw: Callable[[torch.Tensor], Any], cut: Cut, inside: bool, backend: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if inside:
            x = cut(x + 1)
        draw(x)
        return x + 1

    found = []
    for run in (program, dovetail.compile(program, backend=backend)):
        x = torch.zeros(8, 8)
        torch.manual_seed(3)
        result = run(x if inside else cut(x))
        found.append((result, x, torch.rand(1)))
    assert found[0][0].stride() == found[1][0].stride()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=0.0 if backend == "aten" else 1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.sampled(12)
def test_numbers_are_those_of_eager(draw: str, inside: bool) -> None:
    for cut in CUTS.values():
        check(DRAWS[draw], cut, inside, "aten")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("draw", ["normal_", "uniform_"])
@pytest.mark.sampled(2)
def test_on_inductor(draw: str) -> None:
    for cut in ("column", "transposed block", "block"):
        check(DRAWS[draw], CUTS[cut], False, "inductor")


def test_one_graph_where_it_is_possible() -> None:
    compiled = dovetail.compile(lambda x: x[:, ::2].exponential_().sum(), backend="aten", fullgraph=True)
    torch.manual_seed(3)
    expected = torch.zeros(8, 8)[:, ::2].exponential_().sum()
    torch.manual_seed(3)
    assert torch.equal(compiled(torch.zeros(8, 8)), expected)
    with pytest.raises(GraphBreakError, match="not contiguous"):
        dovetail.compile(lambda x: x[:, ::2].normal_().sum(), backend="aten", fullgraph=True)(torch.zeros(8, 8))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "fill",
    [
        lambda x: torch.rand(x.shape, out=x),
        lambda x: torch.full(x.shape, 2.0, out=x),
        lambda x: torch.arange(x.shape[0], out=x),
        lambda x: x.resize_(x.shape).mul_(2),
        lambda x: x.resize_as_(torch.ones(x.shape)).mul_(2),
    ],
)
def test_a_resize_to_the_same_size_keeps_the_strides(fill: Callable[[torch.Tensor], Any]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        fill(y[:, 1])
        return y

    found = []
    for run in (program, dovetail.compile(program, backend="aten")):
        torch.manual_seed(3)
        found.append(run(torch.arange(18.0).reshape(6, 3)))
    assert torch.equal(*found)
