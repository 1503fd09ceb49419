"""Loops over a changing size that leave a list of tensors, and what joins them again: one call for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dovetail
from tests.differential import same
from tests.shapes.calls import check_calls

LENGTHS = (12, 9, 7, 11, 4, 3, 30, 5, 1)


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _calls(lengths: tuple[int, ...] = LENGTHS) -> list[tuple[torch.Tensor]]:
    return [(_leaf(3, length, 4),) for length in lengths]


class Blockwise(nn.Module):
    """Attention that is linear in the length: blocks of a window, with a state that goes from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.block = 4
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = x.shape[1]
        outs = []
        state = torch.zeros(x.shape[0], 4, 4, dtype=x.dtype)
        for number in range((length + self.block - 1) // self.block):
            start = number * self.block
            end = min(start + self.block, length)
            part = x[:, start:end]
            outs.append(part @ self.weight + part @ state)
            state = state * 0.5 + part.transpose(-1, -2) @ part
        outs = torch.cat(outs, dim=1)
        return outs.sin(), state


def test_blocks_with_a_state_are_one_call_for_all_lengths() -> None:
    # A size of 1 has an entry of its own.
    check_calls(Blockwise(), _calls(), entries=3)


def test_an_attribute_that_the_loop_reads_is_guarded() -> None:
    module = Blockwise()
    compiled: Any = dovetail.compile(module, backend="aten", fullgraph=True)
    for block in (4, 3, 5):
        module.block = block
        for length in (12, 9, 7):
            x = _leaf(3, length, 4)
            same(module(x), compiled(x))


def windows(x: torch.Tensor) -> torch.Tensor:
    found = []
    for start in range(0, x.shape[1], 3):
        found.append(functional.softmax(x[:, start : start + 3], dim=1))  # noqa: PERF401
    return torch.cat(found, 1)


def stacked(x: torch.Tensor) -> torch.Tensor:
    found = [x[:, 0].cos()]
    for position in range(1, x.shape[1]):
        found.append(found[-1] * 0.9 + x[:, position])
    result = torch.stack(found, dim=1)
    return result * 2


def pairs(x: torch.Tensor) -> torch.Tensor:
    chunks = []
    for start in range(0, x.shape[1], 4):
        end = min(x.shape[1], start + 4)
        chunks.append((start, end))
    others = []
    for start in range(0, x.shape[1], 4):
        end = min(x.shape[1], start + 4)
        others.append((start, end))
    if len(chunks) != len(others):
        raise ValueError(f"{len(chunks)} and {len(others)}")
    outs = []
    extra = []
    for (start, end), (other_start, other_end) in zip(chunks, others):  # noqa: B905
        part = x[:, start:end]
        if end - start > 2:
            part = part * 2
        outs.append(part @ x[:, other_start:other_end].transpose(1, 2) @ part)
    joined = torch.cat(outs, dim=1)
    return joined + 1, *extra  # type: ignore[return-value]


def pooled(x: torch.Tensor) -> torch.Tensor:
    parts = []
    for start in range(0, x.shape[1], 4):
        parts.append(x[:, start : start + 4].mean(1))  # noqa: PERF401
    means = torch.stack(parts, 1)
    return means.cumsum(1)


def counts_in_a_variable(x: torch.Tensor) -> torch.Tensor:
    found, count = [], 0
    for start in range(0, x.shape[1], 4):
        found.append(x[:, start : start + 4] * 2)
        count += 1
    joined = torch.cat(found, 1)
    return joined * count


def padded(x: torch.Tensor) -> torch.Tensor:
    parts = []
    for start in range(0, x.shape[1], 4):
        part = x[:, start : start + 4]
        parts.append(functional.pad(part, (0, 0, 0, 4 - part.shape[1])))
    joined = torch.cat(parts, 1)
    return joined.flip(1)


@pytest.mark.parametrize("program", [windows, stacked, pairs, counts_in_a_variable, padded])
def test_a_list_that_is_joined_is_one_call_for_all_lengths(program: Callable[..., Any]) -> None:
    check_calls(program, _calls((12, 9, 7, 11, 4, 3, 30, 5)), entries=2)


def test_a_single_block_has_an_entry_of_its_own_at_most() -> None:
    check_calls(pooled, _calls((12, 9, 7, 4, 3, 2, 30)), entries=3)


def test_second_derivatives_are_those_of_eager() -> None:
    def gradient(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.cos().sum(), x)
        return second

    compiled = dovetail.compile(stacked, backend="aten", fullgraph=True)
    for length in (5, 8, 6):
        x = _leaf(3, length, 4)
        assert torch.allclose(gradient(stacked, x), gradient(compiled, x), rtol=1e-12, atol=1e-12)
    assert len(compiled.entries) == 2


def kept_in_two_places(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    found: list[torch.Tensor] = []
    alias = found
    for start in range(0, x.shape[1], 4):
        found.append(x[:, start : start + 4] * 2)  # noqa: PERF401
    return torch.cat(found, 1), len(alias)


def counted_afterwards(x: torch.Tensor) -> torch.Tensor:
    found = []
    for start in range(0, x.shape[1], 4):
        found.append(x[:, start : start + 4] * 2)  # noqa: PERF401
    joined = torch.cat(found, 1)
    return joined * len(found)


def held_to_a_bound(x: torch.Tensor) -> torch.Tensor:
    found = []
    for start in range(0, x.shape[1], 4):
        found.append(x[:, start : start + 4] * 2)  # noqa: PERF401
    joined = torch.cat(found, 1)[:, :10]
    return joined * 2


def drops(x: torch.Tensor) -> torch.Tensor:
    found = []
    for start in range(0, x.shape[1], 4):
        found.append(functional.dropout(x[:, start : start + 4], 0.5))  # noqa: PERF401
    joined = torch.cat(found, 1)
    return joined * 2


def writes_to_its_argument(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    found = []
    for start in range(0, x.shape[1], 4):
        found.append(x[:, start : start + 4].add_(start))  # noqa: PERF401
    joined = torch.cat(found, 1)
    return joined + x


def last_part(x: torch.Tensor) -> torch.Tensor:
    found = []
    part = x
    for start in range(0, x.shape[1], 4):
        part = x[:, start : start + 4]
        found.append(part * 2)
    joined = torch.cat(found, 1)
    return joined.sum() + part.sum()


@pytest.mark.parametrize(
    "program",
    [kept_in_two_places, counted_afterwards, held_to_a_bound, drops, writes_to_its_argument, last_part],
)
def test_what_is_no_such_region_is_still_right(program: Callable[..., Any]) -> None:
    check_calls(program, _calls((9, 5, 7, 11)))
