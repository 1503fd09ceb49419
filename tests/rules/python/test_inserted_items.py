"""``list.insert`` of numbers that change: into a list of a fixed length no capture for each number, into one that grows few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import backward, captures, gradients, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


def newest_first(items: Any, x: Tensor) -> Any:
    loss = (x * 2).sum()
    items.insert(0, loss.item())
    items.pop()
    return loss, sum(items) / len(items)


def in_the_middle(items: Any, x: Tensor) -> Any:
    items.insert(-1, x.sum().item())
    del items[0]
    return x * items[-1], list(items)


def far_out(items: Any, x: Tensor) -> Any:
    other = items
    items.insert(100, 4.5)
    items.insert(-100, items[1] + 1)
    other.pop(0)
    other.pop()
    return x * items[0], other is items


def grows(items: Any, x: Tensor) -> Any:
    loss = (x * 3).sum()
    items.insert(0, loss.item())
    return loss * 2


def grows_and_is_read(items: Any, x: Tensor) -> Any:
    items.insert(1, x.detach() + 1)
    return x * len(items), items[1]


def raises(items: Any, x: Tensor) -> Any:
    items.insert(0, 7.0)
    if len(items) > 4:
        items.pop()
        raise KeyError("full")
    return x * 2


@pytest.mark.parametrize(
    ("function", "most"),
    [(newest_first, 4), (in_the_middle, None), (far_out, 3), (grows, 8), (grows_and_is_read, None), (raises, None)],
)
def test_an_item_is_put_into_a_list(function: Callable[..., Any], most: int | None) -> None:
    compiled = dovetail.compile(function, backend="aten")
    mine: list[Any] = [1.5, 2.5, 3.5]
    others = list(mine)
    for number in range(10):
        found = []
        for run, items in ((function, mine), (compiled, others)):
            x = (torch.arange(3.0) + number * 37 % 11).requires_grad_()
            try:
                result = run(items, x)
            except KeyError as error:
                found.append((str(error), list(items)))
                continue
            backward(result)
            found.append((result, gradients([x]), list(items)))
        same(*found, f"call {number}")
    if most is not None:
        assert captures(compiled) <= most
