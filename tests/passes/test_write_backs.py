"""New values of inputs that the operators of a graph write themselves, as soon as nothing reads the old ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from tests.runtime.test_release import most_bytes

Swap = Callable[..., Any]


def training(make: Callable[[nn.Module], torch.optim.Optimizer], compiled: bool) -> tuple[list[int], list[Tensor]]:
    """The peaks of the first and of a later step, and everything that the steps leave."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)], nn.BatchNorm1d(128))
    optimizer = make(model)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = dovetail.compile(step, backend="aten", fullgraph=True) if compiled else step
    x = torch.randn(4, 128)
    peaks = [most_bytes(lambda: run(x)) for _ in range(4)]
    state = [item for each in optimizer.state.values() for item in each.values() if isinstance(item, Tensor)]
    return [peaks[0], peaks[3]], [*model.state_dict().values(), *state]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_step_holds_no_second_set_of_weights(name: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(model.parameters(), lr=0.01)  # type: ignore[no-any-return]

    (first, later), left = training(make, compiled=True)
    (eager_first, eager_later), expected = training(make, compiled=False)
    weights = 6 * 128 * 129 * 4
    assert first <= eager_first + weights // 2
    # Eager's later steps may free the old gradients before the new ones are there, or not.
    assert later <= eager_later + weights * 3 // 2
    assert all(torch.equal(one, other) for one, other in zip(left, expected, strict=True))


def exchanged(a: Tensor, b: Tensor) -> Tensor:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)
    return old * 2


def in_turn(a: Tensor, b: Tensor) -> Tensor:
    total = a + b
    a.copy_(b + 1)
    b.copy_(total * 3)
    a.mul_(b)
    return total


def through_views(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    row = a[0]
    new = a + b
    before = row * 2
    a.copy_(new)
    b[1:].add_(row[0])
    return before, row


@pytest.mark.parametrize("program", [exchanged, in_turn, through_views])
def test_old_values_are_read_before_they_are_written(program: Swap) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for make in (lambda: torch.arange(6.0).reshape(2, 3), lambda: torch.arange(6.0).reshape(3, 2).t()):
        mine, theirs = [make(), make() * 5], [make(), make() * 5]
        for _ in range(2):
            versions = [value._version for value in mine]
            actual, expected = compiled(*mine), program(*theirs)
            results = [actual, expected] if isinstance(actual, Tensor) else [*actual, *expected]
            half = len(results) // 2
            for one, other in zip([*mine, *results[:half]], [*theirs, *results[half:]], strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
            assert [value._version > old for value, old in zip(mine, versions, strict=True)] == [True, True]


def test_a_write_before_an_error_has_happened_as_in_eager() -> None:
    def count_and_pick(count: Tensor, x: Tensor, index: Tensor) -> Tensor:
        count.add_(1)
        return x[index] * count

    compiled = dovetail.compile(count_and_pick, backend="aten", fullgraph=True)
    x = torch.ones(3)
    for function in (compiled, count_and_pick):
        count = torch.zeros(())
        function(count, x, torch.tensor([1]))
        with pytest.raises(IndexError):
            function(count, x, torch.tensor([5]))
        assert count.item() == 2


def transposed_then_written(a: Tensor) -> Tensor:
    a.t_()
    a.add_(torch.arange(4.0).view(2, 2))
    return a * 1


def written_then_transposed(a: Tensor) -> Tensor:
    a.add_(torch.arange(4.0).view(2, 2))
    a.t_()
    a.mul_(2)
    return a + 1


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", [transposed_then_written, written_then_transposed])
def test_an_input_that_gets_other_strides_is_written_behind_the_graph(program: Swap, backend: str) -> None:
    compiled = dovetail.compile(program, backend=backend)
    mine, theirs = (torch.tensor([[1.0, 2.0], [3.0, 4.0]]) for _ in range(2))
    for _ in range(2):
        assert torch.equal(compiled(mine), program(theirs))
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
