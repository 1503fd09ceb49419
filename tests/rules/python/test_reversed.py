"""``reversed`` of objects that give their length and their items by methods of their own."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dovetail


class Counted:
    """Its items are products of ``factor``; there is none at ``hole``."""

    def __init__(self, count: int, factor: int = 2, hole: int = -1) -> None:
        self.count, self.factor, self.hole = count, factor, hole

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int:
        if place == self.hole:
            raise IndexError(place)
        return place * self.factor


class Backwards(Counted):
    def __reversed__(self) -> Iterator[int]:
        return iter([7, 8])


class Hundreds(list[int]):
    def __getitem__(self, place: Any) -> Any:
        return 100


def grown(x: torch.Tensor, old: Counted) -> Any:
    """The length counts when the iterator is made, an item when it is asked for."""
    items = reversed(old)  # type: ignore[call-overload]
    found = [next(items)]
    old.count, old.factor = 9, old.factor + 1
    return x + sum(found), found + list(items), next(items, "ended")


def layers(x: torch.Tensor, old: Any) -> Any:
    for layer in reversed(LAYERS):
        x = layer(x)
    for layer in reversed(LAYERS[1:]):  # type: ignore[call-overload]
        x = layer(x).tanh()
    return x.sum()


LAYERS = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
PROGRAMS: dict[str, Any] = {
    "layers": layers,
    "a sequence of modules": lambda x, old: [layer(x).sum() for layer in reversed(nn.Sequential(*LAYERS))],
    "parameters": lambda x, old: [item.sum() for item in reversed(nn.ParameterList([x, x * 2]))],
    "old": lambda x, old: x + sum(reversed(old)),
    "grown": grown,
    "new, of a size": lambda x, old: (x, list(reversed(Counted(x.shape[0])))),  # type: ignore[call-overload]
    "with a hole": lambda x, old: (x, list(reversed(Counted(4, hole=1)))),  # type: ignore[call-overload]
    "backwards": lambda x, old: (x, list(reversed(Backwards(3)))),
    "a list of its own": lambda x, old: (x, list(reversed(Hundreds([1, 2])))),
    "a user's list": lambda x, old: (x, list(reversed(collections.UserList([1, x])))),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_items_come_backwards(name: str, backend: str) -> None:
    def answers(call: Any) -> list[Any]:
        old, seen = Counted(3), []
        for rows in (2, 2, 4):
            with torch.no_grad():
                seen.append(str(call(torch.ones(rows, 2), old)))
            old.factor += rows
            seen.append(str(vars(old)))
        return seen

    compiled = dovetail.compile(PROGRAMS[name], backend=backend, fullgraph=True)
    assert answers(compiled) == answers(PROGRAMS[name])
