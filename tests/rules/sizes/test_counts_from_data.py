"""Counts that a program reads from an index (``int(index.max()) + 1``) stay in the graph, breaks allowed or not."""

from __future__ import annotations

import copy

import pytest
import torch

import dovetail
from tests.differential import check_calls, compare_call, compare_modules, leaf

INDICES = ([0, 0, 1, 1, 2, 2], [0, 1, 2, 2, 2, 2])


def _pooled(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    count = int(index.max()) + 1 if index.numel() else 0
    return x.new_zeros(count, x.shape[1]).index_add(0, index, x)


def last(x: torch.Tensor, index: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (x.new_zeros([int(index[-1]) + 1]).index_add(0, index, x.sum(-1)) * goal.sum()).square()


def beside_a_known_size(x: torch.Tensor, index: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (_pooled(x, index).sum(-1) - goal).square().mean()


def number_itself(x: torch.Tensor, index: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    counts = torch.arange(int(index[-1]))
    return (x[:2, 0] * counts + goal[:2]).sum() * int(index[-1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", [last, beside_a_known_size, number_itself])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_one_graph(function, fullgraph: bool) -> None:
    goal = torch.randn(3)
    calls = [(leaf(6, 2), torch.tensor(index), goal) for index in INDICES]
    compiled = dovetail.compile(function, backend="aten", fullgraph=fullgraph)
    compiled(*calls[0])
    assert dovetail.events_of(compiled).count("graph break") == 0
    check_calls(function, calls, entries=1, fullgraph=fullgraph)


@pytest.mark.usefixtures("quiet")
def test_another_count_runs_eagerly() -> None:
    """A count of 1 is broadcast in eager, another one raises there."""
    goal = torch.randn(3)
    check_calls(
        beside_a_known_size, [(leaf(6, 2), torch.tensor(INDICES[0]), goal), (leaf(6, 2), torch.zeros(6).long(), goal)]
    )
    compiled = dovetail.compile(beside_a_known_size, backend="aten")
    compiled(leaf(6, 2), torch.tensor(INDICES[0]), goal)
    with pytest.raises(RuntimeError, match="must match the size"):
        compiled(leaf(6, 2), torch.tensor([0, 0, 1, 1, 1, 1]), goal)


class Queue(torch.nn.Module):
    """Keys of earlier batches and the place of the next ones, as MoCo keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(2, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = x @ self.keys.clone()
        with torch.no_grad():
            place = int(self.place)
            self.keys[:, place : place + len(x)] = x.T
            self.place[0] = (place + len(x)) % 8
        return logits * float(self.place)


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_queue_with_a_place_that_moves_on(backend: str) -> None:
    queue = Queue()
    compiled = dovetail.compile(copy.deepcopy(queue), backend=backend)
    for _ in range(5):
        compare_call(queue, compiled, (leaf(4, 2),), exact=backend == "aten")
    compare_modules(queue, compiled, "queue", exact=backend == "aten")
    assert dovetail.events_of(compiled).count("graph break") == 0


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_a_whole_step_with_forces() -> None:
    """The step of a potential: energies by molecule, forces, an update."""

    def losses(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())

        def step(x: torch.Tensor, index: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            positions = x.detach().requires_grad_()
            energies = _pooled(model(positions), index).squeeze(1)
            (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
            loss = (energies - goal).square().mean() + slope.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = dovetail.compile(step, backend="aten") if compiled else step
        found = [call(torch.randn(6, 2), torch.tensor(index), torch.randn(3)) for index in INDICES * 2]
        if compiled:
            events = dovetail.events_of(call)
            assert (events.count("graph break"), events.count("capture")) == (0, 3)
        return found

    assert torch.equal(torch.stack(losses(False)), torch.stack(losses(True)))


@pytest.mark.usefixtures("quiet")
def test_more_than_one_element_is_the_programs_error() -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[: int(index)]

    compiled = dovetail.compile(function, backend="aten")
    with pytest.raises(Exception) as expected:
        function(leaf(3), torch.tensor([1, 2]))
    with pytest.raises(expected.type, match="converted to"):
        compiled(leaf(3), torch.tensor([1, 2]))
