"""Loops over dictionaries and lists of numbers that change from call to call: no graph for each number, and eager's results."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import clone_inputs, entries_of, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor
CALLS = 6


def items(x: Tensor, state: Any) -> Any:
    for place, (_, value) in enumerate(state.items()):
        x = x * value + place
    return x


def averages(x: Tensor, state: Any) -> Any:
    for key in state:
        state[key] = state[key] * 0.9 + 0.1
    return x * state["a"]


def averages_of_items(x: Tensor, state: Any) -> Any:
    for key, value in state.items():
        state[key] = value * 0.9 + 0.1
    return x * state["a"]


def a_later_one_is_written(x: Tensor, state: Any) -> Any:
    for value in state.values():
        x = x + value
        state["b"] = state["b"] + 1.0
    return x


def comprehension(x: Tensor, state: Any) -> Any:
    doubled = {key: value * 2 for key, value in state.items()}
    return x * doubled["a"] + doubled["b"]


def sums(x: Tensor, state: Any) -> Any:
    return x * sum(state.values()), max(state.values()), sorted(state.items()), list(state.values())


def unpacked(x: Tensor, state: Any) -> Any:
    first, second = state.values()
    return x * first + second, (*state.values(), 1)


def early_end(x: Tensor, state: Any) -> Any:
    for value in state.values():
        if value > 1.7:
            return x * 2
        x = x + value
    return x


def graph_break_inside(x: Tensor, state: Any) -> Any:
    for value in state.values():
        x = x + value
        torch._dynamo.graph_break()
        x = x * value
    return x


def largest(x: Tensor, state: Any) -> Any:
    return x, sorted(state, key=state.get), max(state, key=lambda key: state[key])


def copies(x: Tensor, state: Any) -> Any:
    copy, other = state.copy(), {"c": 1}
    other.update(state)
    return x * copy["a"] * other["b"], type(copy), {"d": 1, **state}


def merged(x: Tensor, state: Any) -> Any:
    both = {"c": 2.5}
    both |= state
    return x * (dict(state) | both)["a"]


SAME_GRAPH = (
    *(items, averages, averages_of_items, a_later_one_is_written, comprehension, sums, unpacked, early_end),
    *(graph_break_inside, largest),
)


def as_view(x: Tensor, state: Any) -> Any:
    view = state.values()
    state["a"] = state["a"] + 1
    return x, sum(view), len(view), 2.0 in state.values(), next(iter(state.items()))


def grows_inside(x: Tensor, state: Any) -> Any:
    try:
        for key, value in state.items():
            state[key + "z"] = value
    except RuntimeError as error:
        del state["az"]
        return x, str(error)


def texts(x: Tensor, state: Any) -> Any:
    return x, str(dict(state)), f"{state['a']}", list(map(state.get, state))


def run(function: Callable[..., Any], make: Callable[[], Any]) -> list[Any]:
    state, found = make(), []
    for call in range(CALLS):
        found.append((function(torch.arange(3.0), state), dict(state)))
        state["a"] += 0.25
        state["b"] += 3 * (call == CALLS // 2)
    return clone_inputs(found)


KINDS = {
    "dict": lambda: {"a": 1.5, "b": 0.5},
    "whole numbers": lambda: {"a": 3, "b": 5.0},
    "ordered": lambda: OrderedDict(a=1.5, b=0.5),
    "default": lambda: defaultdict(float, a=1.5, b=0.5),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", SAME_GRAPH)
def test_dictionaries(function: Callable[..., Any], kind: str) -> None:
    compiled = dovetail.compile(function, backend="aten")
    same(run(function, KINDS[kind]), run(compiled, KINDS[kind]))
    # The first capture, one in which "a" is a symbol, one in which "b" is one as well, and another for whole numbers.
    assert entries_of(compiled) <= 4


@pytest.mark.parametrize("function", [copies, merged])
def test_copies(function: Callable[..., Any]) -> None:
    compiled = dovetail.compile(function, backend="aten")
    same(run(function, KINDS["dict"]), run(compiled, KINDS["dict"]))
    assert entries_of(compiled) <= 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["dict", "ordered"])
@pytest.mark.parametrize("function", [as_view, grows_inside, texts])
def test_what_needs_the_numbers_stays_right(function: Callable[..., Any], kind: str) -> None:
    compiled = dovetail.compile(function, backend="aten")
    same(run(function, KINDS[kind]), run(compiled, KINDS[kind]))


def in_a_loop(x: Tensor, numbers: Any) -> Any:
    for value in numbers:
        x = x * value
    return x


def counted(x: Tensor, numbers: Any) -> Any:
    for place, value in enumerate(numbers):
        x = x + value * place
    return x


def appended_inside(x: Tensor, numbers: Any) -> Any:
    for value in numbers:
        x = x + value
        if len(numbers) < 5:
            numbers.append(value + 1)
    del numbers[3:]
    return x


def as_tensor(x: Tensor, numbers: Any) -> Any:
    return x * torch.tensor(numbers)[0]


@pytest.mark.parametrize("function", [in_a_loop, counted, as_tensor, appended_inside])
def test_lists(function: Callable[..., Any]) -> None:
    compiled = dovetail.compile(function, backend="aten")
    mine, others = [1.5, 0.5, 2.0], [1.5, 0.5, 2.0]
    for _ in range(CALLS):
        x = torch.arange(3.0)
        same(function(x, mine), compiled(x, others))
        same(mine, others)
        mine[0] += 0.25
        others[0] += 0.25
    # A part of the list is deleted at the end of the last one, which reads all items.
    assert entries_of(compiled) <= (CALLS if function is appended_inside else 3)


def sum_of_a_history(x: Tensor, numbers: Any) -> Any:
    numbers.append(numbers[-1] + 0.5)
    return x * sum(numbers) / len(numbers)


def written_inside(x: Tensor, numbers: Any) -> Any:
    try:
        for value in numbers:
            x = x * value
            numbers.append(value)
    except RuntimeError as error:
        return x, str(error)


@pytest.mark.parametrize("function", [in_a_loop, sum_of_a_history, written_inside])
def test_deques(function: Callable[..., Any]) -> None:
    compiled = dovetail.compile(function, backend="aten")
    mine, others = deque([1.5, 0.5, 2.0], maxlen=3), deque([1.5, 0.5, 2.0], maxlen=3)
    for call in range(CALLS):
        same(function(torch.arange(3.0), mine), compiled(torch.arange(3.0), others))
        same(list(mine), list(others))
        mine[1] = others[1] = call + 0.25
    assert function is not in_a_loop or entries_of(compiled) <= 4


def taken_from_the_front(x: Tensor, numbers: Any) -> Any:
    first = numbers.pop(0)
    numbers.append(first + 0.5)
    return x * first


def taken_from_the_end(x: Tensor, numbers: Any) -> Any:
    last = numbers.pop()
    try:
        list.pop(numbers, 7)
    except IndexError as error:
        numbers.append(last + 0.5)
        return x * last, numbers[0], str(error)


@pytest.mark.parametrize("function", [taken_from_the_front, taken_from_the_end])
def test_numbers_that_are_taken_out(function: Callable[..., Any]) -> None:
    compiled = dovetail.compile(function, backend="aten")
    mine, others = [1.5, 7.25, 9.0], [1.5, 7.25, 9.0]
    for call in range(2 * CALLS):
        same(function(torch.arange(3.0) + call, mine), compiled(torch.arange(3.0) + call, others))
        same(mine, others)
    assert entries_of(compiled) <= 4


def test_a_counter_in_a_tuple_that_is_taken_out() -> None:
    def function(x: Tensor, history: Any) -> Any:
        if not history:
            history.append((1.1, 0.125, 1))
            return x
        noise, rate, steps = history.pop()
        history.append((noise, rate, steps + 1) if noise == 1.1 else (1.1, rate, 1))
        return x * rate, steps

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    mine: list[Any] = []
    others: list[Any] = []
    for _ in range(2 * CALLS):
        same(function(torch.arange(3.0), mine), compiled(torch.arange(3.0), others))
        assert mine == others and list(map(type, mine[0])) == list(map(type, others[0]))
    assert entries_of(compiled) <= 3


@pytest.mark.sampled(5)
@pytest.mark.parametrize("change", [99999.0, -0.0, True, 7, "text"])
def test_a_long_list_is_guarded_as_a_whole(change: Any) -> None:
    numbers: list[Any] = [float(place) for place in range(3000)]

    def function(x: Tensor) -> Any:
        return (
            x * len(set(map(type, numbers))),
            numbers[0],
            [value for value in numbers if not isinstance(value, str)][-1],
        )

    compiled = dovetail.compile(function, backend="aten")
    for place in (None, 0, 2999):
        if place is not None:
            numbers[place] = change
        for _ in range(2):
            same(function(torch.ones(2)), compiled(torch.ones(2)))
    numbers.append(1.0)
    same(function(torch.ones(2)), compiled(torch.ones(2)))


class Counted(dict[str, float]):
    """Its own ``copy`` and ``items`` count their calls."""

    calls = 0

    def copy(self) -> dict[str, float]:
        self.calls += 1
        return dict.copy(self)

    def items(self) -> Any:
        self.calls += 1
        return super().items()


def of_a_class_of_its_own(x: Tensor, state: Any) -> Any:
    for _, value in state.items():
        x = x * value
    state.update(c=1.0)
    return x * state.copy()["a"], state.calls


def with_wrong_arguments(x: Tensor, state: Any) -> Any:
    errors: list[str] = []
    for call in (
        lambda: dict.copy(),
        lambda: dict.update(),
        lambda: dict.items(),
        lambda: state.copy(1),
        lambda: state.items(1),
    ):
        try:
            call()
        except TypeError as error:
            errors.append(str(error))
    return x, errors


@pytest.mark.parametrize("function", [of_a_class_of_its_own, with_wrong_arguments])
def test_methods_of_a_subclass(function: Callable[..., Any]) -> None:
    same(
        run(function, lambda: Counted(a=1.5, b=0.5)),
        run(dovetail.compile(function, backend="aten"), lambda: Counted(a=1.5, b=0.5)),
    )
