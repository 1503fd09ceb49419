"""``list(range(n))`` over a size that changes: a plain list, with a graph for each length, and eager's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

SIZES = (9, 12, 22)
HELD: dict[str, Any] = {}


def compare(program: Callable[..., Any], sizes: tuple[int, ...] = SIZES, **options: Any) -> list[int]:
    """Results of all calls; how many entries there were after each."""

    def outer(x: torch.Tensor) -> Any:
        return program(x)

    compiled = dovetail.compile(outer, backend="aten", **options)
    entries = []
    for size in sizes:
        x = torch.randn(3, size)
        same(program(x), compiled(x))
        entries.append(len(compiled.entries))
    return entries


def pooled(positions: list[int], first: bool) -> list[int]:
    if first:
        return [-1, *[]] + positions[1:-1][::2]
    return positions[::2]


def relative(positions: list[int], other: list[int], stride: int) -> torch.Tensor:
    reference = other[0] - positions[0]
    high = reference + len(other) * stride
    low = other[0] - positions[-1]
    return torch.arange(high, low - 1, -stride, dtype=torch.long)


def of_positions(x: torch.Tensor) -> Any:
    positions = list(range(x.shape[1]))
    once = pooled(positions, True)
    twice = pooled(once, True)
    return [relative(positions, once, 2), relative(once, twice, 4), relative(once, once, 1), len(twice), x * 2]


def as_tensors(x: torch.Tensor) -> Any:
    every = list(range(1, x.shape[1], 2))
    mixed = [0, x.shape[1] - 1] + list(range(x.shape[1]))[2:]
    return torch.tensor(every), torch.tensor(mixed, dtype=torch.float32), x[:, every] * 2, x[0, mixed] + x[:, mixed]


def with_a_write(x: torch.Tensor) -> Any:
    y = x * 2
    y[:, list(range(0, x.shape[1], 3))] = 0.0
    return y


def examined(x: torch.Tensor) -> Any:
    positions = list(range(x.shape[1]))
    kinds = isinstance(positions, list), isinstance(positions, tuple), type(positions) is list, bool(positions)
    return x * len(positions), kinds, positions[0], positions[3], positions is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [of_positions, as_tensors, with_a_write, examined])
def test_a_list_of_positions_has_a_graph_for_each_length(program: Callable[..., Any]) -> None:
    captures = compare(program, fullgraph=True)
    assert captures == sorted(captures)


def returned(x: torch.Tensor) -> Any:
    return x * 2, list(range(x.shape[1]))


def appended(x: torch.Tensor) -> Any:
    positions = list(range(x.shape[1]))
    other = positions
    other.append(-5)
    return x * 2, positions, other is positions


def comprehended(x: torch.Tensor) -> Any:
    return x * 2, [item * 2 for item in list(range(x.shape[1]))], sum(list(range(x.shape[1])))


def compared(x: torch.Tensor) -> Any:
    positions = list(range(x.shape[1]))
    return x * 2, positions == [*range(9)], 11 in positions, positions < [0, 5], [1] != positions


def shown(x: torch.Tensor) -> Any:
    positions = list(range(x.shape[1]))
    return x * 2, f"{positions}", str([positions]), max(positions), sorted(positions, reverse=True), tuple(positions)


def matched(x: torch.Tensor) -> Any:
    match list(range(x.shape[1])):
        case [first, _, *rest]:
            return x + first, rest
        case _:
            return x, None


def unpacked(x: torch.Tensor) -> Any:
    first, *_, last = list(range(x.shape[1]))
    return x + first + last, [*list(range(x.shape[1])), 3], list(range(x.shape[1])) * 2


def stored(x: torch.Tensor) -> Any:
    HELD["positions"] = list(range(x.shape[1]))
    return x * 2


def sliced_backwards(x: torch.Tensor) -> Any:
    positions = list(range(x.shape[1]))
    return x * 2, positions[::-1], positions[-3:], positions[:4], positions[x.shape[1] - 1]


def out_of_range(x: torch.Tensor) -> Any:
    try:
        return x * list(range(x.shape[1]))[14]
    except IndexError:
        return x - 1


def after_a_break(x: torch.Tensor) -> Any:
    positions = list(range(x.shape[1]))
    print(end="")
    return x * positions[-1], positions


def to_methods(x: torch.Tensor) -> Any:
    positions = list(range(x.shape[1]))
    return x * 2, positions.index(4), positions.copy(), hasattr(positions, "extend"), positions.pop()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "program",
    [
        returned,
        appended,
        comprehended,
        compared,
        shown,
        matched,
        unpacked,
        stored,
        sliced_backwards,
        out_of_range,
        after_a_break,
        to_methods,
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_list_that_is_used_as_a_list_is_one(program: Callable[..., Any]) -> None:
    compare(program, (9, 12, 15))
    if program is stored:
        assert HELD["positions"] == [*range(15)] and type(HELD["positions"]) is list
