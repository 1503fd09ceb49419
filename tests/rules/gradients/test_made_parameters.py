"""Parameters that the function makes: eager makes those that leave it, at a graph break; others are in the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import CaptureError, GraphBreakWarning
from tests.differential import check_calls, check_training, leaf, same


class Codebook(torch.nn.Module):
    """A codebook that follows what it has coded, by parameters that are made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(3, 2)
        self.codes = torch.nn.Parameter(torch.randn(4, 2), requires_grad=False)
        self.sums = torch.nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        coded = self.encode(x)
        choice = torch.nn.functional.one_hot(torch.cdist(coded, self.codes).argmin(1), 4).float()
        self.sums = torch.nn.Parameter(self.sums * 0.9 + 0.1 * choice.t() @ coded)
        self.codes = torch.nn.Parameter(self.sums / (1 + choice.sum(0)[:, None]), requires_grad=False)
        return (choice @ self.codes - coded).square()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("backend", ["aten", "eager"])
def test_a_codebook_of_new_parameters(backend: str) -> None:
    batches = [(torch.randn(5, 3),) for _ in range(3)]
    check_training(Codebook(), lambda module, x: module(x).mean(), batches, dovetail.compile(backend=backend))


def returned(x: torch.Tensor) -> Any:
    weight = torch.nn.Parameter(x.detach() * 2)
    return weight


def beside_its_loss(x: torch.Tensor) -> Any:
    weight = torch.nn.Parameter(x.detach() * 2)
    return (weight * x).sum(), weight


def without_gradient(x: torch.Tensor) -> Any:
    return {"weight": torch.nn.Parameter(x.detach() * 2, requires_grad=False)}, x * 3


@pytest.mark.parametrize("program", [returned, beside_its_loss, without_gradient])
def test_a_parameter_that_leaves_is_made_by_eager(program: Any) -> None:
    compiled = dovetail.compile(program, backend="aten")
    x = leaf(3)
    with pytest.warns(GraphBreakWarning, match="a parameter is made that leaves the graph"):
        found = compiled(x)
    expected = program(x)
    same(expected, found)
    for one in (expected, found):
        if program is beside_its_loss:
            one[0].backward()
    if program is beside_its_loss:
        same(expected[1].grad, found[1].grad)
    with pytest.raises(CaptureError, match="a parameter is made inside and leaves the function"):
        dovetail.capture(program, (x,))


def test_a_parameter_that_stays_is_in_the_graph() -> None:
    def program(x: torch.Tensor) -> Any:
        weight = torch.nn.Parameter(x.detach() * 2)
        loss = (weight * weight).sum()
        (slope,) = torch.autograd.grad(loss, weight)
        return slope * x, type(weight) is torch.nn.Parameter, isinstance(weight, torch.nn.Parameter)

    check_calls(program, [(leaf(3),), (leaf(3),)], entries=1)
