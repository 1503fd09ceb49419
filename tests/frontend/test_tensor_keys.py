"""Dictionaries and sets whose keys are tensors, as the state of an optimizer is, against eager."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Table = dict[torch.Tensor, Any]


def get(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    return key * table.get(key, 5.0) + table.get(other, 7.0)


def contains(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    return key * (1 if key in table else 2) * (3 if other in table else 5)


def write(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    table[other] = key * 2
    table[key] = 4.0
    return table[other] + table[key]


def delete(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    del table[key]
    return key + len(table) + (1 if key in table else 0)


def pop(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    return key * table.pop(key) + table.pop(other, 2.0)


def set_default(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    return key * table.setdefault(key, 9.0) + table.setdefault(other, 11.0)


def go_through(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    return key + sum(tensor.sum() * value for tensor, value in table.items())


def copied(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    mine = dict(table)
    mine[other] = 3.0
    return key * mine[key] + mine[other] * mine.get(other)


def made_inside(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    mine = {key: 2.0, other: 3.0}
    mine.update(table)
    return key * mine[key] + other * mine[other] + len(mine)


def updated(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    table.update({key: 21.0, other: 23.0})
    return key * table[key] + other * table[other] + len(table)


def united(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    return key * len({key, other} | set(table)) + len({key} | table.keys()) + len({other: 1.0} | table)


def set_made_inside(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    found = set(table)
    found.add(key)
    return key * len(found) + (1 if other in found else 2)


def computed_key(table: Table, key: torch.Tensor, other: torch.Tensor) -> Any:
    mine: defaultdict[torch.Tensor, list[Any]] = defaultdict(list)
    computed = key * 2
    mine[computed].append(other)
    mine[computed].append(key)
    return mine[computed][0] + mine[computed][1]


FUNCTIONS: list[Callable[..., Any]] = [
    get,
    contains,
    write,
    delete,
    pop,
    set_default,
    go_through,
    copied,
    made_inside,
    updated,
    united,
    set_made_inside,
    computed_key,
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_table_keyed_by_tensors(function: Callable[..., Any]) -> None:
    results = []
    compiled = dovetail.compile(function, backend="aten")
    for call in (function, compiled):
        found = []
        tensors = [torch.full((3,), float(index + 1)) for index in range(4)]
        for present in ([0], [0, 1], [1, 0], [0]):
            table = {tensors[index]: float(index + 2) for index in present}
            result = call(table, tensors[0], tensors[2])
            found.append((result, [next(i for i, item in enumerate(tensors) if item is key) for key in table]))
            found.append(list(table.values()))
        # Another tensor of the same form is another key.
        table = {tensors[3]: 13.0, tensors[0]: 17.0}
        found.append((call(table, tensors[3], tensors[0]), list(table.values())))
        results.append(found)
    same(results[0], results[1])


def test_a_set_of_tensors_that_existed_before() -> None:
    first, second, third = (torch.full((2,), float(index)) for index in range(3))
    chosen = {first, second}

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + (1 if x in chosen else 10) + (100 if y in chosen else 1000)

    compiled = dovetail.compile(function, backend="aten")
    for pair in ((first, third), (third, first), (second, first), (third, third)):
        same(function(*pair), compiled(*pair))
    chosen.discard(first)
    same(function(first, second), compiled(first, second))
