"""``bisect`` among constants; where objects of the program are compared, the graph breaks."""

from __future__ import annotations

import bisect
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import check_calls, same


def _placed(x: torch.Tensor, borders: list[int]) -> Any:
    found = [bisect.bisect_left(borders, 2), bisect.bisect(borders, 2), bisect.bisect_right(borders, x=2, lo=1, hi=2)]
    borders.append(5)
    return found, bisect.bisect_left(borders, 5), bisect.bisect_left(("a", "c"), "b"), x * found[1]


def test_one_graph() -> None:
    compiled = dovetail.compile(_placed, backend="aten", fullgraph=True)
    for borders in ([1, 2, 3], [1, 2, 3], [2, 2, 3], [0, 1]):
        ours, theirs = list(borders), list(borders)
        same(_placed(torch.ones(2), theirs), compiled(torch.ones(2), ours))
        assert ours == theirs


def test_among_sizes() -> None:
    def program(x: torch.Tensor) -> Any:
        return bisect.bisect([2, 4, 6], x.shape[0]), bisect.bisect_left([1, x.shape[0], 9], 4), x * 2

    check_calls(program, [(torch.ones(size),) for size in (2, 3, 4, 7, 8)])


def test_a_number_that_changes_has_an_entry_for_each_place() -> None:
    borders = [4, 10, 10]

    def program(x: torch.Tensor, step: int, share: float) -> Any:
        return bisect.bisect(borders, step), bisect.bisect_left((4, 10.5), step), bisect.bisect([0.25], share), x * step

    numbers = [*range(2, 20, 3), 4, 10, 3, 18]
    calls = [(torch.ones(2), number, number / 100) for number in numbers]
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for call in calls:
        same(program(*call), compiled(*call))
    assert len(compiled.entries) <= 6
    borders[0] = 17
    for call in calls:
        same(program(*call), compiled(*call))


@pytest.mark.usefixtures("quiet")
def test_with_a_key_of_the_program() -> None:
    log: list[int] = []

    def key(item: int) -> int:
        log.append(item)
        return -item

    compiled = dovetail.compile(lambda x: (bisect.bisect([3, 2, 1], -2, key=key), x * 2), backend="aten")
    for _ in range(2):
        assert compiled(torch.ones(2))[0] == 2
    assert log == [2, 1, 2, 1]
