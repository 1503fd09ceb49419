"""Loops over sizes, numbers that index, and numbers kept in containers: no graph for each of their values."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakWarning
from tests.differential import check_entries, compare_call, compilations, leaf


def recurrent(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """With its state in a dictionary."""
    states = {"last": torch.zeros(x.shape[0], x.shape[2])}
    outputs = torch.zeros_like(x)
    for step in range(x.shape[1]):
        states["last"] = torch.tanh(states["last"] @ weight + x[:, step])
        outputs[:, step] = states["last"] * 2
    return outputs.sum() + states["last"].mean()


def test_a_loop_over_a_size_that_changes_is_one_body_for_all_sizes() -> None:
    compiled = dovetail.compile(recurrent, backend="aten")
    weight = leaf(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        for batch, length in ((2, 6), (3, 9)):
            compare_call(recurrent, compiled, (leaf(batch, length, 4), weight))
        settled = compilations(compiled)
        for batch, length in ((2, 20), (3, 3), (6, 11), (2, 6), (5, 2)):
            compare_call(recurrent, compiled, (leaf(batch, length, 4), weight))
    assert compilations(compiled) == settled
    breaks = [str(event) for event in dovetail.events_of(compiled).events if event.name == "graph break"]
    assert any("as many rounds as a size that changes" in text and "range(x.shape[1])" in text for text in breaks)


def test_a_loop_whose_rounds_stay_the_same_is_one_graph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        total = x.sum() * 0
        for start in range(0, x.shape[0], 16):
            total = total + x[start : start + 16].square().mean()
        for _ in range(2):
            total = total * 2
        return total

    assert check_entries(program, [(leaf(size, 3),) for size in (5, 7, 11, 15, 3)], fullgraph=False) == 2


@pytest.mark.slow
def test_fullgraph_unrolls_a_loop_for_each_number_of_rounds() -> None:
    weight = leaf(4, 4)
    assert check_entries(recurrent, [(leaf(2, size, 4), weight) for size in (5, 7, 5, 9, 7)]) == 3


def test_a_loop_inside_of_an_operator_is_left_to_python() -> None:
    class Steps:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def __add__(self, other: torch.Tensor) -> torch.Tensor:
            for step in range(self.x.shape[0]):
                other = other + self.x[step]
            return other

    def program(x: torch.Tensor) -> torch.Tensor:
        return Steps(x) + x.sum()

    assert check_entries(program, [(leaf(size),) for size in (5, 7, 5, 9)], fullgraph=False) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [3, -2, 1, -1])
def test_rounds_and_items_of_a_stepped_range(step: int) -> None:
    def program(x: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        size = x.shape[0]
        found = []
        for at in range(1, size, step) if step > 0 else range(size - 1, 2, step):
            found.append(at)
        return found, x.sum()

    check_entries(program, [(torch.randn(size),) for size in (5, 6, 7, 2, 4)])
    check_entries(program, [(torch.randn(size),) for size in (5, 6, 7, 2, 4)], fullgraph=False)


INDICES = torch.tensor([0, 1, 1])
KEYS: dict[str, Any] = {
    "number": lambda at: at,
    "last": lambda at: (..., at),
    "first and rest": lambda at: (at, ...),
    "negative": lambda at: (slice(None), -at),
    "twice": lambda at: (at, at, slice(None, None, 2)),
    "new dimension": lambda at: (at, None, slice(1, 3)),
    "between tensors": lambda at: (INDICES, at, INDICES),
    "after a tensor": lambda at: (INDICES, ..., at),
    "before a tensor": lambda at: (at, INDICES),
    "truth": lambda at: (True, at),
    "in a slice": lambda at: (slice(at, None), at),
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.sampled(6)
def test_a_number_that_changes_selects(name: str) -> None:
    key = KEYS[name]

    def read(x: torch.Tensor, at: int) -> torch.Tensor:
        return (x[key(at)] * 2).sum(0)

    def write(x: torch.Tensor, at: int) -> torch.Tensor:
        y = x * 2
        y[key(at)] = x.sum() + y[key(at)]
        return y

    assert check_entries(read, [(leaf(7, 7, 7), at) for at in (2, 3, 4, 5)]) == 2
    assert check_entries(write, [(leaf(7, 7, 7), at) for at in (2, 3, 4, 5)]) == 2


def test_a_number_outside_of_the_tensor_is_eagers_error() -> None:
    def program(x: torch.Tensor, at: int) -> torch.Tensor:
        return x[at] * 2

    compiled = dovetail.compile(program, backend="aten")
    for at in (2, 3, 4):
        compiled(torch.randn(6), at)
    with pytest.raises(IndexError):
        compiled(torch.randn(6), 6)


def lists(x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    kept: list[Any] = []
    kept.append((0, min(x.shape[0], 100)))
    kept.extend([x.shape[0], x.shape[0] + 1])
    kept.insert(0, x.shape[0] - 1)
    return x[: kept[0]].sum() * kept[1][1], kept


def dictionaries(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    kept: dict[str, Any] = {}
    kept.setdefault("a", x.shape[0])
    kept.update(b=x.shape[0] + 1, c=[x.shape[0]])
    kept.update([("d", x.shape[0] - 1)])
    return x[: kept["d"]].sum() * kept.get("none", x.shape[0]), kept


@pytest.mark.parametrize("program", [lists, dictionaries])
def test_numbers_in_containers_stay_symbolic(program: Any) -> None:
    assert check_entries(program, [(leaf(size, 3),) for size in (5, 7, 9, 4)]) == 2
