"""Schedules as tables of constants: the entry of a step that is counted up, few captures for all of them, eager's numbers."""

from __future__ import annotations

import collections
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
CALLS = 14
RATES = tuple(0.5 / (number + 1) for number in range(20))
DECAYS = list(RATES)
LAYERS = (3, 4, 5, 7, 0, 1, 1.5, -2, 0.0, 6, 1 << 70) * 2
MILESTONES = {3: 0.05, 6: 0.01, 9: 2.0}
Transition = collections.namedtuple("Transition", "state reward")


class Counted:
    """A state with a count, and the last rate."""

    def __init__(self) -> None:
        self.step, self.rate = 0, 1.0
        self.memory: deque[Any] = deque(maxlen=5)


def rates(state: Counted, x: Tensor) -> Any:
    return x * RATES[state.step]


def rates_from_the_end(state: Counted, x: Tensor) -> Any:
    return x * RATES[-state.step - 1], RATES[-1]


def made_here(state: Counted, x: Tensor) -> Any:
    return x * [0.1, 0.05, 0.01][state.step // 4 % 3]


def of_all_kinds(state: Counted, x: Tensor) -> Any:
    return x, LAYERS[state.step]


def looked_up(state: Counted, x: Tensor) -> Any:
    if state.step in MILESTONES:
        state.rate = MILESTONES[state.step]
    return x * state.rate


def got(state: Counted, x: Tensor) -> Any:
    state.rate = MILESTONES.get(state.step, state.rate)
    return x * state.rate, MILESTONES.get(state.step)


def so_far(state: Counted, x: Tensor) -> Any:
    product = 1.0
    for rate in DECAYS[: state.step + 1]:
        product *= 1 - rate / 2
    return x * product


def beyond(state: Counted, x: Tensor) -> Any:
    try:
        return x * (0.5, 0.25, 0.125)[state.step]
    except IndexError:
        return x


def remembered(state: Counted, x: Tensor) -> Any:
    state.memory.append((x, x.sum()))
    drawn, total = state.memory[state.step * 7 % len(state.memory)]
    return drawn * 2 + total, len(state.memory)


def remembered_by_name(state: Counted, x: Tensor) -> Any:
    state.memory.append(Transition(x * 2, 0.5))
    drawn = state.memory[random.randrange(len(state.memory))]
    return drawn.state * drawn.reward, drawn.reward


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (rates, 4),
        (rates_from_the_end, 4),
        (made_here, 3),
        (of_all_kinds, 10),
        (looked_up, 6),
        (got, 7),
        (so_far, 15),
        (beyond, 6),
        (remembered, 12),
        (remembered_by_name, 9),
    ],
)
def test_a_step_that_is_counted_up(function: Callable[..., Any], most: int) -> None:
    found = []
    for is_compiled in (False, True):
        random.seed(3)

        def step(state: Counted, x: Tensor) -> Any:
            result = function(state, x)
            state.step += 1
            return result

        run = dovetail.compile(step, backend="aten") if is_compiled else step
        state = Counted()
        results = [run(state, torch.full((2,), number + 1.0)) for number in range(CALLS)]
        found.append((results, state.step, state.rate, list(state.memory), random.random()))
    same(*found)
    assert captures(run) <= most


def test_a_tuple_in_a_list_is_another_one_later() -> None:
    def function(memory: list[Any], place: int) -> Any:
        first, second = memory[place], memory[0]
        return first[0] + second[0], first is second

    compiled = dovetail.compile(function, backend="aten")
    memory = [(torch.full((2,), float(number)), number) for number in range(6)]
    for place in (2, 3, 0, 4, 1, 0, 5):
        same(function(memory, place), compiled(memory, place))
    memory[3] = (torch.ones(3), 2.5)
    for place in (3, 4, 3):
        if place == 3:
            with pytest.raises(RuntimeError):
                compiled(memory, place)
        else:
            same(function(memory, place), compiled(memory, place))
