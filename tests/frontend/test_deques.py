"""Deques that existed before the call: read, and written to as an effect."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Program = Callable[[Any, torch.Tensor], Any]


def _take_turns(values: Any, x: torch.Tensor) -> torch.Tensor:
    first = values.popleft()
    values.append(first * 2)
    return x + first + values[0] + values[-1]


def _go_through(values: Any, x: torch.Tensor) -> torch.Tensor:
    for value in values:
        x = x + value
    values.append(3)
    return x * len(values)


def _many(values: Any, x: torch.Tensor) -> torch.Tensor:
    values.rotate(1)
    values.extend([x.detach(), 1])
    values.extendleft((2, 3))
    return x * values.pop()


def _clear(values: Any, x: torch.Tensor) -> torch.Tensor:
    values.clear()
    values.append(4)
    return x * values[0]


_PROGRAMS: dict[str, tuple[Program, Callable[[], Any]]] = {
    "sizes": (lambda values, x: (values.append(x.shape[0]), x * 2)[1], lambda: deque(maxlen=3)),
    "results": (lambda values, x: (values.append(x * 2), x + sum(values))[1], lambda: deque(maxlen=3)),
    "turns": (_take_turns, lambda: deque([torch.ones(2), torch.zeros(2)])),
    "loop": (_go_through, lambda: deque([1, 2], maxlen=2)),
    "many": (_many, lambda: deque([1, 2], maxlen=6)),
    "clear": (_clear, lambda: deque([1, 2])),
    "other end": (lambda values, x: (values.appendleft(x), x)[1], lambda: deque([1], maxlen=2)),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_one_graph(name: str) -> None:
    program, make = _PROGRAMS[name]
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    sides = [(program, make()), (compiled, make())]
    for number in range(1, 6):
        x = torch.full((2,), float(number), requires_grad=True)
        found = [(function(values, x), list(values)) for function, values in sides]
        same(*found)


def test_an_index_outside() -> None:
    compiled = dovetail.compile(lambda values, x: x * values[2], backend="aten", fullgraph=True)
    values = deque([1, 2])
    with pytest.raises(IndexError):
        compiled(values, torch.ones(2))
    values.append(5)
    same(torch.full((2,), 5.0), compiled(values, torch.ones(2)))
