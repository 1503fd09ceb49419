"""Lists that a training step makes longer at every call, or fills anew: no entry for each length, and eager's items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


def last_after_append(items: Any, x: Tensor) -> Any:
    items.append(x.sum().item())
    return x * 2, items[-1]


def last_two(items: Any, x: Tensor) -> Any:
    items.append(x + 1)
    items.append(3.5)
    return items[-2] * items[-1], items[-1]


def further_back(items: Any, x: Tensor) -> Any:
    items.append(x + 1)
    return items[-1] * items[-2]


def last_after_insert(items: Any, x: Tensor) -> Any:
    items.append(x + 1)
    items.insert(0, 2.0)
    return items[-1] * items[0], len(items)


def last_after_pop(items: Any, x: Tensor) -> Any:
    items.append(x + 1)
    items.append(2.0)
    items.pop()
    return items[-1]


def written_after_append(items: Any, x: Tensor) -> Any:
    items.append(x + 1)
    items[-1] = x - 1
    return items[-1]


def extended(items: Any, x: Tensor) -> Any:
    items.extend([x * 2, 1.5])
    items.extend((4.5,))
    return items[-3] + items[-1], x + 1


def added(items: Any, x: Tensor) -> Any:
    before = items
    items += [x * 2]
    items += (2.5,)
    return items is before, items[-2]


def with_itself(items: Any, x: Tensor) -> Any:
    if len(items) < 12:
        items.extend(items)
        items += items
    return x + len(items), items[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [list, deque, lambda items: deque(items, maxlen=3)])
@pytest.mark.parametrize(
    ("function", "most"),
    [
        (last_after_append, 2),
        (last_two, 2),
        (further_back, None),
        (last_after_insert, None),
        (last_after_pop, None),
        (written_after_append, None),
        (extended, 2),
        (added, 2),
        (with_itself, None),
    ],
)
def test_a_list_that_grows(function: Callable[..., Any], most: int | None, kind: Any) -> None:
    compiled = dovetail.compile(function, backend="aten")
    eager_items, items = kind([0.5, 1.5]), kind([0.5, 1.5])
    if function is last_after_insert and getattr(items, "maxlen", None):
        pytest.skip("a full deque refuses it")
    for number in range(8):
        x = torch.full((2,), number + 1.0)
        same(function(eager_items, x), compiled(items, x.clone()))
        same(list(eager_items), list(items))
    assert most is None or kind is not list or captures(compiled) <= most


def test_two_names_of_one_list() -> None:
    def function(items: list[Any], others: list[Any], x: Tensor) -> Any:
        items.append(x * 2)
        return others[-1], len(others)

    compiled = dovetail.compile(function, backend="aten")
    for number in range(6):
        eager_items: list[Any] = [0.5] * (number + 1)
        items = [0.5] * (number + 1)
        apart = number % 2
        same(
            function(eager_items, [7.5] if apart else eager_items, torch.ones(2)),
            compiled(items, [7.5] if apart else items, torch.ones(2)),
        )


def test_the_iterable_raises_in_between() -> None:
    """What came before stays in the list."""

    def numbers() -> Iterator[float]:
        yield 1.5
        raise KeyError("no more")

    def function(items: list[Any], x: Tensor) -> Any:
        try:
            items.extend(numbers())
        except KeyError:
            items.append(2.5)
        return x + 1, len(items)

    compiled = dovetail.compile(function, backend="aten")
    eager_items: list[Any] = []
    items: list[Any] = []
    for _ in range(4):
        same(function(eager_items, torch.ones(2)), compiled(items, torch.ones(2)))
        same(eager_items, items)


class Noted(list[Any]):
    """A list with an ``extend`` of its own."""

    noted = 0

    def extend(self, values: Any) -> None:
        self.noted += 1
        super().extend(values)


def test_a_subclass_with_an_extend_of_its_own() -> None:
    def function(items: Noted, x: Tensor) -> Any:
        items.extend([x * 2])
        return x + 1, items.noted

    compiled = dovetail.compile(function, backend="aten")
    eager_items, items = Noted(), Noted()
    for _ in range(4):
        same(function(eager_items, torch.ones(2)), compiled(items, torch.ones(2)))
        same(list(eager_items), list(items))


def test_the_list_is_put_back_where_the_function_raises() -> None:
    def function(items: list[Any], x: Tensor) -> Any:
        items.extend([x, 1.5])
        items += [2.5]
        raise ValueError("no")

    items = [0.5]
    with pytest.raises(ValueError, match="no"):
        dovetail.compile(function, backend="aten")(items, torch.ones(2))
    assert len(items) == 4 and items[2:] == [1.5, 2.5]


# --- gone through -----------------------------------------------------------------------------------------------------


def mean(items: Any, x: Tensor) -> Any:
    return x * (sum(items) / len(items))


def largest(items: Any, x: Tensor) -> Any:
    return x * max(items), min(items), sorted(items)[0]


def as_tensor(items: Any, x: Tensor) -> Any:
    return x + torch.tensor(items).mean()


def joined_texts(items: Any, x: Tensor) -> Any:
    return x + 1, ",".join([str(item) for item in items])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", [mean, largest, as_tensor, joined_texts])
@pytest.mark.parametrize("kind", [list, deque])
def test_a_history_that_is_gone_through(function: Callable[..., Any], kind: Any) -> None:
    if function is as_tensor and kind is deque:
        pytest.skip("torch.tensor takes no deque")
    compiled = dovetail.compile(function, backend="aten", recompile_limit=64)
    items = kind()
    found = []
    for number in range(24):
        items.append(number * 0.75 + 0.1)
        x = torch.full((2,), number + 1.0)
        same(function(items, x), compiled(items, x))
        found.append(captures(compiled))
    assert function is joined_texts or found[-1] == found[11]


# --- windows and whole histories ---------------------------------------------------------------------------------------


def moving_average(items: Any, x: Tensor) -> Any:
    items.append(x.sum().item())
    recent = items[-3:]
    return x * (sum(recent) / len(recent)), recent


def window_of_tensors(items: Any, x: Tensor) -> Any:
    items.append(x * 2)
    items.append(x + 1)
    return torch.stack(items[-3:]).mean(0), len(items[-3:]), items[-1:]


def window_before_append(items: Any, x: Tensor) -> Any:
    recent = items[-2:]
    items.append(len(items) * 0.75 + 0.1)
    return x * sum(recent), recent


def all_tensors(items: Any, x: Tensor) -> Any:
    items.append(x * 2)
    return torch.stack(items).mean(0)


def oldest_dropped(items: Any, x: Tensor) -> Any:
    items.append(x.sum().item())
    if len(items) > 4:
        items.pop(0)
    return x * (sum(items) / len(items))


def oldest_deleted(items: Any, x: Tensor) -> Any:
    items.append(x.sum().item())
    if len(items) > 4:
        del items[0]
    return x * max(items)


def best_three(items: Any, x: Tensor) -> Any:
    items.append(x.sum().item())
    items.sort()
    del items[3:]
    return x + items[0]


def emptied(items: Any, x: Tensor) -> Any:
    items.append(x.sum().item())
    if len(items) < 3:
        return x
    mean = sum(items) / 3
    items.clear()
    return x * mean


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("function", "most"),
    [
        (moving_average, 9),
        (window_of_tensors, 4),
        (window_before_append, 7),
        (all_tensors, 11),
        (oldest_dropped, 15),
        (oldest_deleted, 22),
        (best_three, 10),
        (emptied, 15),
    ],
)
def test_captures_end_while_the_list_goes_on(function: Callable[..., Any], most: int) -> None:
    compiled = dovetail.compile(function, backend="aten")
    eager_items: list[Any] = []
    items: list[Any] = []
    found = []
    for number in range(24):
        x = torch.full((2,), (number * 7 % 5) + 1.5)
        same(function(eager_items, x), compiled(items, x.clone()))
        same(list(eager_items), list(items))
        found.append(captures(compiled))
    assert found[-1] <= most and found[-1] == found[18]


@pytest.mark.parametrize("function", [moving_average, window_of_tensors, all_tensors])
def test_windows_in_one_graph(function: Callable[..., Any]) -> None:
    if function is moving_average:
        pytest.skip("a number is read from a tensor's data")
    compiled = dovetail.compile(function, backend="aten", fullgraph=True, recompile_limit=16)
    eager_items: list[Any] = []
    items: list[Any] = []
    for number in range(12):
        x = torch.full((2,), number + 1.5)
        same(function(eager_items, x), compiled(items, x.clone()))


def test_a_window_in_a_list_that_shrinks_again() -> None:
    def function(items: list[Any], x: Tensor) -> Any:
        return x * len(items[-3:]), items[-3:]

    compiled = dovetail.compile(function, backend="aten")
    for length in (1, 5, 6, 2, 7, 3, 0, 4, 8):
        items = [number * 0.5 + length for number in range(length)]
        same(function(items, torch.ones(2)), compiled(items, torch.ones(2)))


@pytest.mark.parametrize("width", [1, 3])
def test_stretches_of_a_list_of_samples(width: int) -> None:
    samples = [torch.full((2,), float(number)) for number in range(20)]

    class State:
        at = 0

    def function(x: Tensor, state: State) -> Any:
        stretch = samples[state.at : state.at + width]
        state.at += width
        return x + torch.stack(stretch).sum(0) if stretch else x, len(stretch)

    compiled = dovetail.compile(function, backend="aten")
    state, eager_state = State(), State()
    for start in (-4, 0, 16):
        state.at = eager_state.at = start
        for _ in range(8):
            same(function(torch.ones(2), eager_state), compiled(torch.ones(2), state))
