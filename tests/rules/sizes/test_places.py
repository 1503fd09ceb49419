"""Numbers that change as places of lists, and as what is looked for in them: no entry for each number."""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import backward, captures, clone_inputs, entries_of, gradients, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


def check(function: Callable[..., Any], make: Callable[[], Any], numbers: list[Any], **options: Any) -> Any:
    """Call the function with a container of its own on each side, and one number after the other; returns the compiled one."""
    compiled = dovetail.compile(function, backend="aten", **options)
    mine, others = make(), clone_inputs(make())
    for number in numbers:
        x, y = (torch.arange(1.0, 4.0).requires_grad_() for _ in range(2))
        expected, result = function(mine, number, x), compiled(others, number, y)
        same(expected, result)
        backward(expected)
        backward(result)
        same(gradients([x]), gradients([y]))
        same(list(mine), list(others))
    return compiled


def tensors() -> Any:
    return [torch.full((3,), float(place), requires_grad=place % 2 == 0) for place in range(12)]


def item(items: Any, place: int, x: Tensor) -> Any:
    return x * items[place]


def two_items(items: Any, place: int, x: Tensor) -> Any:
    return x * items[place] + items[place - 2].detach(), place


def item_and_first(items: Any, place: int, x: Tensor) -> Any:
    return x * items[place] + items[3]


def written_in_place(items: Any, place: int, x: Tensor) -> Any:
    with torch.no_grad():
        items[place].mul_(2)
    return x * items[place]


def written_before(items: Any, place: int, x: Tensor) -> Any:
    items[2] = items[3]
    return x * items[place]


PLACES = [2, 3, 4, 5, 7, 3, 8, 2, 9, 5]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [list, tuple, deque])
@pytest.mark.parametrize(("function", "most"), [(item, 4), (two_items, 6), (item_and_first, 6), (written_in_place, 4)])
def test_tensors_at_places_that_change(function: Any, most: int, kind: Any) -> None:
    compiled = check(function, lambda: kind(tensors()), PLACES)
    assert entries_of(compiled) <= most


def test_an_item_behind_a_write_is_eagers() -> None:
    check(written_before, tensors, PLACES)


def test_places_behind_the_end_and_counted_from_it() -> None:
    def from_the_end(items: Any, place: int, x: Tensor) -> Any:
        return x * items[place - 6]

    check(from_the_end, tensors, [*PLACES, 0, 1, 11])
    compiled = dovetail.compile(item, backend="aten")
    items = tensors()
    for place in (4, 5, 6):
        same(item(items, place, torch.ones(3)), compiled(items, place, torch.ones(3)))
    with pytest.raises(IndexError):
        compiled(items, 12, torch.ones(3))


def test_one_tensor_at_two_places() -> None:
    def both(items: Any, place: int, x: Tensor) -> Any:
        with torch.no_grad():
            items[place].add_(1)
        return x * items[place - 1], items[place] is items[place - 1]

    def make() -> Any:
        items = [torch.full((3,), float(place)) for place in range(12)]
        items[6] = items[5]
        return items

    check(both, make, [3, 4, 5, 6, 8, 6, 9])


@pytest.mark.parametrize("rates", [[0.5, 0.25, 0.125, 0.75, 1.5, 2.5, 3.5], [3, 5, 7, 9, 11, 13, 15]])
def test_numbers_at_places_that_change(rates: Any) -> None:
    compiled = check(item, lambda: rates, [2, 3, 4, 5, 6, 3, 2])
    assert captures(compiled) <= 4


def test_an_item_that_is_set_at_a_place_that_changes() -> None:
    def swapped(items: Any, place: int, x: Tensor) -> Any:
        items[place] = x.detach() * 2
        return x + 1

    compiled = check(swapped, lambda: [torch.zeros(3) for _ in range(12)], PLACES)
    assert captures(compiled) <= 5
    check(swapped, lambda: [torch.zeros(3) for _ in range(12)], PLACES[:4], fullgraph=True)


def joined(items: Any, places: Any, x: Tensor) -> Any:
    return x * torch.stack([items[place] for place in places]).sum(0)


def in_a_loop(items: Any, places: Any, x: Tensor) -> Any:
    for place in places:
        x = x * 2 + items[place]
    return x.sin()


def list_that_grows_in_its_loop(items: Any, places: Any, x: Tensor) -> Any:
    for place in places:
        x = x + items[place]
        if len(places) < 5:
            places.append(place - 1)
    return x


def by_sum(items: Any, places: Any, x: Tensor) -> Any:
    return x * sum(places), max(places), sorted(places), list(zip(items, places, strict=False))[0]


DRAWN = [
    [2, 3, 4],
    [5, 7, 2],
    [3, 3, 9],
    [8, 2, 5],
    [0, 1, 2],
    [11, 4, 4],
    [6, 5, 4],
    [9, 9, 9],
    [1, 1, 0],
    [10, 0, 3],
    [7, 8, 9],
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (joined, {}),
        (in_a_loop, {}),
        (list_that_grows_in_its_loop, {}),
        (by_sum, {}),
        (joined, {"fullgraph": True, "recompile_limit": 4}),
        (in_a_loop, {"dynamic": False, "recompile_limit": 6}),
    ],
)
def test_places_drawn_at_random(function: Any, options: Any) -> None:
    compiled = dovetail.compile(function, backend="aten", **options)
    items = [torch.full((3,), float(place)) for place in range(12)]
    for places in DRAWN:
        mine, others, x = list(places), list(places), torch.arange(1.0, 4.0)
        same(function(items, mine, x), compiled(items, others, x))
        same(mine, others)


def test_loops_over_drawn_places_do_not_go_on_being_compiled() -> None:
    compiled, draw = dovetail.compile(joined, backend="aten"), random.Random(0)
    items, x = [torch.full((3,), float(place)) for place in range(12)], torch.ones(3)
    for _ in range(20):
        places = [draw.randrange(2, 12) for _ in range(3)]
        same(joined(items, places, x), compiled(items, places, x))
    assert captures(compiled) <= 12


class Always(dict[Any, Any]):
    def __contains__(self, key: object) -> bool:
        return True


class Never(list[Any]):
    def __contains__(self, key: object) -> bool:
        return False


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("container", "most"),
    [
        ((5, 9), 5),
        ([5, 9], 5),
        (deque([5, 9]), 5),
        ({5, 9}, 5),
        ({5: 1, 9: 2}, 5),
        ((5.0, "a", None), 16),
        ((True, "a"), 3),
        ([5.0, "a", True], 4),
        ((), 3),
        (Always(), 3),
        (Never([4]), 3),
    ],
)
@pytest.mark.parametrize("negated", [False, True])
def test_a_number_that_changes_is_looked_for(container: Any, most: int, negated: bool) -> None:
    def function(items: Any, step: int, x: Tensor) -> Any:
        found = step not in items if negated else step in items
        return x * 2 if found else x + 1

    compiled = check(function, lambda: container, list(range(14)))
    assert entries_of(compiled) <= most


def test_a_milestone_that_is_added_later() -> None:
    def function(milestones: Any, step: int, x: Tensor) -> Any:
        return x * 2 if step in milestones else x + 1

    compiled = dovetail.compile(function, backend="aten")
    milestones, x = [3, 7], torch.ones(2)
    for step in range(14):
        if step == 9:
            milestones.append(11)
        same(function(milestones, step, x), compiled(milestones, step, x))


@pytest.mark.parametrize("search", [operator.contains, lambda items, step: items.count(step) > 0])
def test_floats_that_change_are_looked_for(search: Any) -> None:
    def function(items: Any, step: float, x: Tensor) -> Any:
        return x * 2 if search(items, step) else x + 1

    check(function, lambda: (0.5, 2.5), [0.25, 0.5, 1.5, 2.5, 3.5, 0.0, 2.5])
