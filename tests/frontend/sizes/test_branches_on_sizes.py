"""Branches on sizes: each side of a comparison is compiled by the first call that takes it, and results are eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError, OptionError
from tests.differential import same


def _run(program: Any, lengths: list[int], **options: Any) -> tuple[list[int], Any]:
    """How many entries there are after each call; every result and gradient is eager's."""
    compiled = dovetail.compile(program, backend="aten", **options)
    counts = []
    for length in lengths:
        x = torch.randn(3, length, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        expected, actual = program(twin), compiled(x)
        same(expected, actual)
        expected.sum().backward()
        actual.sum().backward()
        same(twin.grad, x.grad)
        counts.append(len(compiled.entries))
    return counts, compiled


def _windowed(x: torch.Tensor) -> torch.Tensor:
    return x[:, -8:].cumsum(1) if x.shape[1] >= 8 else x * 3


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [([12, 9, 5, 7, 11, 8, 2, 30], [1, 2, 3, 3, 3, 3, 3, 3]), ([5, 7, 9, 12, 4], [1, 2, 3, 3, 3])],
)
def test_each_side_of_a_window_is_compiled_once(lengths: list[int], counts: list[int]) -> None:
    assert _run(_windowed, lengths, fullgraph=True)[0] == counts


def test_a_side_of_a_side() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 9:
            return x + 1
        return x * 2 if x.shape[1] % 2 else x - 1

    assert _run(program, [20, 14, 7, 6, 12, 9, 5, 4])[0] == [1, 2, 3, 4, 4, 4, 4, 4]


def test_three_comparisons_in_a_row() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1 if x.shape[1] > 9 else x
        y = y * 2 if x.shape[1] > 6 else y
        return y - 3 if x.shape[1] > 4 else y

    assert _run(program, [20, 14, 12, 8, 5, 3, 4])[0] == [1, 2, 2, 3, 4, 5, 5]


def test_sizes_that_agree_are_changed_together() -> None:
    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum() if x.shape[1] > 6 else (x + mask).mean()

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for length in (12, 9, 5, 4, 6, 7):
        x, mask = torch.randn(3, length), torch.randn(length)
        same(program(x, mask), compiled(x, mask))
    assert len(compiled.entries) == 3


def test_a_side_that_raises_when_it_is_called() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 16:
            raise ValueError("too long")
        return x * 2

    counts, compiled = _run(program, [12, 9, 5, 16])
    assert counts == [1, 2, 2, 2]
    with pytest.raises(ValueError, match="too long"):
        compiled(torch.randn(3, 17))


def test_a_side_that_cannot_be_captured_is_refused_when_it_is_called() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] <= 6:
            print(x.shape)
        return x * 2

    counts, compiled = _run(program, [12, 9, 8, 7], fullgraph=True)
    assert counts == [1, 2, 2, 2]
    with pytest.raises(GraphBreakError, match="print"):
        compiled(torch.randn(3, 5))


def test_what_the_program_leaves_behind_is_left_once() -> None:
    seen: list[int] = []
    counters = {"calls": 0}

    def program(x: torch.Tensor) -> torch.Tensor:
        counters["calls"] += 1
        seen.append(x.shape[1])
        noise = torch.rand(()) if x.shape[1] > 6 else torch.rand(2).sum()
        return x * noise

    twin_seen, twin_counters = [], 0
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for call, length in enumerate((12, 9, 5, 7)):
        x = torch.randn(2, length)
        torch.manual_seed(call)
        actual = compiled(x)
        state = torch.get_rng_state()
        torch.manual_seed(call)
        noise = torch.rand(()) if length > 6 else torch.rand(2).sum()
        same(x * noise, actual)
        assert torch.equal(state, torch.get_rng_state())
        twin_seen.append(length)
        twin_counters += 1
        assert seen == twin_seen and counters["calls"] == twin_counters


@pytest.mark.parametrize("kind", ["view", "shared", "transposed", "strided"])
def test_inputs_of_every_layout(kind: str) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y if x.shape[1] > 6 else x.sum() + y.sum()

    def inputs(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.randn(3, length), torch.randn(length, 3)
        match kind:
            case "view":
                return torch.randn(4, length)[1:], y
            case "shared":
                return x, x.t()
            case "transposed":
                return torch.randn(length, 3).t(), y
        return torch.randn(3, 2 * length)[:, ::2], y

    compiled = dovetail.compile(program, backend="aten")
    for length in (12, 9, 5, 4, 7):
        x, y = inputs(length)
        same(program(x, y), compiled(x, y))
    assert len(compiled.entries) == 3


def test_a_module_in_training_that_counts() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)
            self.long = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[2] > 6:
                self.long += 1
                return self.norm(x)
            return x

    torch.manual_seed(0)
    module, twin = Counting(), Counting()
    compiled = dovetail.compile(twin, backend="aten", fullgraph=True)
    for length in (12, 9, 5, 4, 8):
        x = torch.randn(2, 4, length)
        same(module(x), compiled(x))
        same(dict(module.state_dict()), dict(twin.state_dict()))
        assert module.long == twin.long


def test_the_option_is_gone() -> None:
    with pytest.raises(OptionError, match="no option 'other_sides'"):
        dovetail.compile(torch.sin, other_sides=2)


@pytest.mark.slow
def test_the_rounds_of_a_loop_in_steps() -> None:
    def chunks(x: torch.Tensor) -> torch.Tensor:
        # With a list it would be one call for all lengths.
        parts = {start: x[:, start : start + 4].cumsum(1) for start in range(0, x.shape[1], 4)}
        return torch.cat(list(parts.values()), 1)

    counts, compiled = _run(chunks, [12, 9, 7, 11, 10, 12, 6], fullgraph=True)
    assert counts[-1] == 4, [str(event) for event in dovetail.events_of(compiled).events]
