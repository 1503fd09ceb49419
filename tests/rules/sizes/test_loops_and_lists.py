"""Loops over a changing size that leave a list of tensors, and what joins them again: eager's values at each length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dovetail
from tests.differential import check_calls, same

LENGTHS = (9, 4, 1)


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


def test_blocks_with_a_state() -> None:
    check_calls(Blockwise(), _calls())


@pytest.mark.slow
def test_an_attribute_that_the_loop_reads_is_guarded() -> None:
    module = Blockwise()
    compiled: Any = dovetail.compile(module, backend="aten", fullgraph=True)
    for block in (4, 3, 5):
        module.block = block
        for length in (9, 5):
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", [windows, stacked, pairs, counts_in_a_variable, padded])
def test_a_list_that_is_joined(program: Callable[..., Any]) -> None:
    check_calls(program, _calls((9, 5)))


def test_a_single_block() -> None:
    check_calls(pooled, _calls((9, 4, 2)))


def test_second_derivatives_are_those_of_eager() -> None:
    def gradient(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.cos().sum(), x)
        return second

    compiled = dovetail.compile(stacked, backend="aten", fullgraph=True)
    for length in (3, 5):
        x = _leaf(3, length, 4)
        assert torch.allclose(gradient(stacked, x), gradient(compiled, x), rtol=1e-12, atol=1e-12)


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "program", [kept_in_two_places, counted_afterwards, held_to_a_bound, drops, writes_to_its_argument, last_part]
)
def test_lists_that_are_used_otherwise(program: Callable[..., Any]) -> None:
    check_calls(program, _calls((4, 5)))


class Chunks(nn.Module):
    """A feed-forward layer that is given a few positions at a time."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.size = 4
        self.inner = nn.Linear(4, 8, dtype=torch.float64)
        self.outer = nn.Linear(8, 4, dtype=torch.float64)
        self.dropout = nn.Dropout(rate)
        self.norm = nn.LayerNorm(4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for start in range(0, x.shape[1], self.size):
            part = self.inner(x[:, start : start + self.size])
            parts.append(self.dropout(self.outer(functional.gelu(part))))
        return self.norm(torch.cat(parts, dim=1) + 1)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_modules_in_a_loop_have_their_gradients_and_random_numbers(rate: float) -> None:
    check_calls(Chunks(rate), _calls((6, 4)))


def returned(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[:, at] * at for at in range(x.shape[1])], 1)


def parts_in_a_comprehension(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.cumsum(1) for part in torch.split(x, 4, 1)], 1)


def two_at_once(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = (
        torch.cat([x[:, at : at + 2] for at in range(0, x.shape[1], 2)], 1),
        torch.stack([x[:, at] for at in range(x.shape[1])], 1),
    )
    return left * 2, right * 3


def in_an_outer_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = torch.cat([x[:, at : at + 3].softmax(1) for at in range(0, x.shape[1], 3)], 1)
    return x


@pytest.mark.parametrize("program", [returned, two_at_once, in_an_outer_loop, parts_in_a_comprehension])
def test_a_comprehension_that_is_joined_is_right_at_each_length(program: Callable[..., Any]) -> None:
    check_calls(program, _calls((5, 3)))


class Recurrence(nn.Module):
    """A cell over all positions, as a local variable."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4, dtype=torch.float64)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cell = self.cell
        state = torch.zeros(x.shape[0], 4, dtype=x.dtype)
        states = []
        for at in range(x.shape[1]):
            state = cell(x[:, at], state)
            states.append(state * self.scale)
        return torch.stack(states, dim=1)


def test_a_cell_over_all_positions() -> None:
    check_calls(Recurrence(), _calls((3, 4)))


@pytest.mark.slow
def test_what_changes_in_a_module_that_is_called_is_seen() -> None:
    module = Recurrence()
    compiled: Any = dovetail.compile(module, backend="aten", fullgraph=True)

    def compare() -> None:
        for length in (5, 7):
            x = _leaf(3, length, 4)
            same(module(x), compiled(x))

    compare()
    compare()
    module.scale = 3.0
    compare()
    module.cell = nn.GRUCell(4, 4, dtype=torch.float64)
    compare()
    with torch.no_grad():
        module.cell.weight_ih.mul_(2)
    compare()
    handle = module.cell.register_forward_hook(lambda _module, _args, result: result * 2)
    compare()
    handle.remove()
    compare()


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


class Counted(nn.Module):
    """A loop whose module has a memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.inner(x[:, at : at + 4]) for at in range(0, x.shape[1], 4)], 1)


def test_a_module_that_writes_to_itself() -> None:
    module, twin = Counted(), Counted()
    compiled: Any = dovetail.compile(twin, backend="aten", fullgraph=True)
    for length in (5, 4):
        x = _leaf(3, length, 4)
        same(module(x), compiled(x))
        assert module.inner.calls == twin.inner.calls


SEEN: list[int] = []


def _noting(part: torch.Tensor) -> torch.Tensor:
    SEEN.append(part.shape[1])
    return part * 2


def _doubling(part: torch.Tensor) -> torch.Tensor:
    return part * 2


def with_a_helper(x: torch.Tensor) -> torch.Tensor:
    found = []
    for at in range(0, x.shape[1], 4):
        found.append(_doubling(x[:, at : at + 4]))  # noqa: PERF401
    return torch.cat(found, 1)


def with_a_helper_that_writes(x: torch.Tensor) -> torch.Tensor:
    found = []
    for at in range(0, x.shape[1], 4):
        found.append(_noting(x[:, at : at + 4]))  # noqa: PERF401
    return torch.cat(found, 1)


def _keeping(part: torch.Tensor, kept: list[int] = []) -> torch.Tensor:  # noqa: B006
    kept.append(part.shape[1])
    return part * len(kept)


def with_a_default_that_changes(x: torch.Tensor) -> torch.Tensor:
    found = []
    for at in range(0, x.shape[1], 4):
        found.append(_keeping(x[:, at : at + 4]))  # noqa: PERF401
    return torch.cat(found, 1)


def within_another_list(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    inner: list[torch.Tensor] = []
    outer = [inner]
    for at in range(x.shape[1]):
        outer[0].append(x[:, at] * 2)
    return torch.stack(inner, 1), len(inner)


def test_lists_that_are_known_by_another_name() -> None:
    check_calls(within_another_list, _calls((5, 3)))
    compiled = dovetail.compile(with_a_default_that_changes, backend="aten", fullgraph=True)
    kept = _keeping.__defaults__[0]
    for length in (5, 4):
        x = _leaf(3, length, 4)
        kept.clear()
        expected = with_a_default_that_changes(x)
        kept.clear()
        same(expected, compiled(x))


def test_a_function_that_is_called() -> None:
    check_calls(with_a_helper, _calls((5, 3)))
    compiled = dovetail.compile(with_a_helper_that_writes, backend="aten", fullgraph=True)
    for length in (5, 4):
        x = _leaf(3, length, 4)
        SEEN.clear()
        expected, seen = with_a_helper_that_writes(x), list(SEEN)
        SEEN.clear()
        same(expected, compiled(x))
        assert seen == SEEN


def parts_of_a_split(x: torch.Tensor) -> torch.Tensor:
    found = []
    for part in x.split(4, dim=1):
        found.append(part.softmax(1))  # noqa: PERF401
    return torch.cat(found, 1)


def rows(x: torch.Tensor) -> torch.Tensor:
    state, found = torch.zeros(x.shape[0], 4, dtype=x.dtype), []
    for part in torch.unbind(x, 1):
        state = torch.tanh(state + part)
        found.append(state)
    return torch.stack(found, 1) * 2


def numbered_parts(x: torch.Tensor) -> torch.Tensor:
    found = []
    for number, part in enumerate(x.split(4, 1)):
        found.append(part.sin() * number)
    return torch.cat(found, 1)


def pairs_of_parts(x: torch.Tensor) -> torch.Tensor:
    found = []
    for left, right in zip(x.split(4, 1), (x * 2).split(4, 1), strict=True):
        found.append(left * right.softmax(1))
    return torch.cat(found, 1)


WINDOW = 4


def written_in_steps(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    result = torch.zeros_like(x)
    for start in range(0, x.shape[1], WINDOW):
        result[:, start : start + WINDOW] = x[:, start : start + WINDOW].cumsum(1)
    return result, start


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", [parts_of_a_split, rows, numbered_parts, pairs_of_parts, written_in_steps])
def test_parts_of_a_tensor_are_gone_through(program: Callable[..., Any]) -> None:
    check_calls(program, _calls((6, 3)))


class Returned(nn.Module):
    """What joins the windows is handed to a module at once, in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = []
        for at in range(0, x.shape[1], 4):
            windows.append(self.dropout(self.inner(x[:, at : at + 4]).tanh()))  # noqa: PERF401
        return functional.dropout(self.norm(torch.cat(windows, 1)), 0.3)


def test_without_gradients_the_numbers_and_the_generator_are_those_of_eager() -> None:
    module = Returned()
    compiled: Any = dovetail.compile(module, backend="aten", fullgraph=True)
    with torch.no_grad():
        for length in (6, 5):
            x = torch.randn(2, length, 4)
            torch.manual_seed(length)
            expected, state = module(x), torch.get_rng_state()
            torch.manual_seed(length)
            same(expected, compiled(x))
            assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
def test_the_second_derivative_draws_the_same_numbers() -> None:
    module = Returned()
    compiled: Any = dovetail.compile(module, backend="aten", fullgraph=True)
    for length in (5, 7):
        x = torch.randn(2, length, 4, requires_grad=True)
        found = []
        for function in (module, compiled):
            torch.manual_seed(length)
            (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), [x, module.inner.weight]))
        for expected, actual in zip(*found, strict=True):
            assert torch.allclose(expected, actual, rtol=1e-4, atol=1e-5)
