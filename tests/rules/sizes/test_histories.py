"""Lists and deques that grow from call to call: what is asked of them is no entry for each length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


def appended(history: Any, x: Tensor) -> Any:
    history.append(x * 2)
    return x + 1


def length(history: Any, x: Tensor) -> Any:
    return x * len(history) if len(history) >= 3 else x


def last_ones(history: Any, x: Tensor) -> Any:
    return x * history[-1] / history[-2], len(history)


def average(history: Any, x: Tensor) -> Any:
    return x * (sum(history) / len(history))


def written_and_read(history: Any, x: Tensor) -> Any:
    history.append(x.sum().item() if len(history) % 2 else 2.5)
    return len(history), history[-1], x * history[0]


def taken_out(history: Any, x: Tensor) -> Any:
    history.append(1.5)
    history.append(x)
    first = history[0]
    del history[0]
    return first, x * len(history)


KINDS: list[Callable[..., Any]] = [list, deque, lambda items: deque(items, maxlen=4)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("function", "most"),
    [(appended, 1), (length, 4), (last_ones, 3), (average, None), (written_and_read, None), (taken_out, None)],
)
@pytest.mark.sampled(4)
def test_a_history_is_eagers(function: Any, most: int | None, kind: Any) -> None:
    compiled = dovetail.compile(function, backend="aten")
    eager_history, history = kind([1.25, 0.5]), kind([1.25, 0.5])
    for number in range(8):
        x = torch.full((2,), number + 1.0)
        same(compiled(history, x), function(eager_history, x))
        if function not in (appended, written_and_read):
            eager_history.append(1.5 + number)
            history.append(1.5 + number)
        same(list(history), list(eager_history))
    assert most is None or captures(compiled) <= most


def test_a_full_deque_of_floats_is_one_entry() -> None:
    compiled, history = dovetail.compile(average, backend="aten"), deque([0.5, 1.5, 2.5], maxlen=3)
    for number in range(8):
        history.append(number / 3 + 1)
        same(compiled(history, torch.ones(2)), average(history, torch.ones(2)))
    assert captures(compiled) == 2


def test_how_many_items_a_deque_takes_is_guarded_where_it_is_read() -> None:
    def function(items: Any, x: Tensor) -> Any:
        items.append(3)
        return x * len(items)

    compiled = dovetail.compile(function, backend="aten")
    for most in (2, 3, None, 5):
        same(compiled(deque([1, 2], maxlen=most), torch.ones(2)), function(deque([1, 2], maxlen=most), torch.ones(2)))


def test_the_last_item_may_become_another_one_of_the_others() -> None:
    def function(items: list[Any], x: Tensor) -> Any:
        items[-1]["count"] = len(items)
        return x + items[0]["count"], items[-1] is items[0]

    compiled = dovetail.compile(function, backend="aten")
    eager_items: list[Any] = [{"count": 7}]
    items: list[Any] = [{"count": 7}]
    for number in range(6):
        same(compiled(items, torch.ones(2)), function(eager_items, torch.ones(2)))
        same(items, eager_items)
        for one in (items, eager_items):
            one.append(one[0] if number == 2 else {"count": number})


def test_a_deque_is_put_back_where_the_function_raises() -> None:
    def function(items: Any, x: Tensor) -> Any:
        items.append(x)
        raise ValueError("no")

    items = deque([1, 2], maxlen=2)
    with pytest.raises(ValueError, match="no"):
        dovetail.compile(function, backend="aten")(items, torch.ones(2))
    assert items[0] == 2 and len(items) == 2


def bounded(history: Any, x: Tensor) -> Any:
    history.append(x)
    if len(history) > 6:
        del history[0]
    return x + 1


def appended_twice(history: Any, x: Tensor) -> Any:
    before = len(history)
    history.append(x)
    history.append(before)
    between = len(history)
    history.append(1.5)
    return x + between, len(history) - before


def appended_and_taken_out(history: Any, x: Tensor) -> Any:
    history.append(x)
    first = len(history)
    history.pop()
    return x * first, len(history)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("function", "most"), [(bounded, 5), (appended_twice, 4), (appended_and_taken_out, None)])
@pytest.mark.parametrize("kind", [list, deque, lambda items: deque(items, maxlen=4)])
def test_the_length_behind_an_append(function: Any, most: int | None, kind: Any) -> None:
    compiled = dovetail.compile(function, backend="aten")
    eager_history, history = kind([torch.ones(2)]), kind([torch.ones(2)])
    for number in range(12):
        x = torch.full((2,), float(number))
        same(function(eager_history, x), compiled(history, x.clone()))
        same(list(eager_history), list(history))
    assert most is None or kind is not list or captures(compiled) <= most
