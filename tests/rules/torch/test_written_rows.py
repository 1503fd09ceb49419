"""``buffer[i] = row`` where the index is in a tensor: one graph, with eager's numbers, gradients and counted writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from tests.differential import check_calls, check_training, leaf, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


class Memory(torch.nn.Module):
    """A model with a bank of what it has seen, and a place in it that moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("bank", torch.zeros(3, 3))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """The features, compared with the bank."""
        features = self.linear(x)
        bank: Any = self.bank
        bank[self.place] = features.detach().mean(0)
        self.place.add_(1).remainder_(3)  # type: ignore[operator]
        return features @ bank.clone().T


def two_rows(buffer: Tensor, row: Tensor, index: Tensor) -> Any:
    made = buffer * 1
    made[index] = row
    made[index + 1] = row.sum()
    return made.sin(), made


def a_number(buffer: Tensor, row: Tensor, index: Tensor) -> Any:
    made = buffer.clone()
    made[index] = 3
    made[1] = row
    return made * row


def more_dimensions(buffer: Tensor, row: Tensor, index: Tensor) -> Any:
    made = buffer.double()
    made[index] = row[None, None]
    return made


def the_buffer_itself(buffer: Tensor, row: Tensor, index: Tensor) -> Any:
    part = buffer.detach()[1:]
    part[index] = row.detach()
    return part.sum(), row * part


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("program", [two_rows, a_number, more_dimensions, the_buffer_itself])
def test_one_graph(program: Any, fullgraph: bool) -> None:
    calls = [(leaf(5, 3), leaf(3), torch.tensor(index)) for index in (0, 2, -3)]
    compiled = check_calls(program, calls, entries=1, fullgraph=fullgraph)
    assert not dovetail.events_of(compiled).count("graph break")


def test_a_bank_of_features() -> None:
    def loss(module: Any, x: Tensor) -> Tensor:
        result: Tensor = module(x)
        return result.square().sum()

    check_training(Memory(), loss, [(leaf(4, 3),) for _ in range(5)], dovetail.compile(backend="aten"))


def test_a_second_derivative() -> None:
    found = []
    for run in (two_rows, dovetail.compile(two_rows, backend="aten", fullgraph=True)):
        buffer, row = torch.ones(5, 3).requires_grad_(), torch.linspace(0, 1, 3, requires_grad=True)
        (first,) = torch.autograd.grad(run(buffer, row, torch.tensor(2))[0].sum(), row, create_graph=True)
        found.append((first.detach(), torch.autograd.grad(first.square().sum(), (buffer, row), allow_unused=True)))
    same(found[0], found[1])


def test_an_index_that_lies_outside() -> None:
    compiled = dovetail.compile(two_rows, backend="aten", fullgraph=True)
    compiled(torch.ones(5, 3), torch.ones(3), torch.tensor(1))
    for run in (two_rows, compiled):
        with pytest.raises(IndexError, match="out of bounds"):
            run(torch.ones(5, 3), torch.ones(3), torch.tensor(7))
