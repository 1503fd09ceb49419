"""Two callables take turns: whichever is faster by its times is found, whatever else the times hold."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.tiers.contest import COLD, LOOKS, Contest, judge, signed_rank


class Clock:
    """Time goes on by what the callables take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: Callable[[], float], name: str = "") -> Callable[[list[Any]], list[Any]]:
        def run(inputs: list[Any]) -> list[Any]:
            self.now += seconds()
            return [*inputs, name]

        return run


def contest_of(champion: Callable[[], float], challenger: Callable[[], float]) -> Contest:
    clock = Clock()
    return Contest(clock.taking(champion, "champion"), clock.taking(challenger, "challenger"), clock)


def play(contest: Contest, most: int = 2 * (LOOKS[-1] + COLD)) -> int:
    calls = 0
    while contest.verdict is None and calls < most:
        contest([])
        calls += 1
    return calls


@pytest.mark.parametrize(("share", "is_faster"), [(0.5, True), (0.97, True), (1.0, False), (1.03, False), (2.0, False)])
def test_the_faster_one_is_found_among_noise(share: float, is_faster: bool) -> None:
    noise = random.Random(3)

    def time(share: float = 1.0) -> float:
        # Every tenth call waits for something else.
        return share * noise.lognormvariate(0, 0.05) * (30 if noise.random() < 0.1 else 1)

    contest = contest_of(time, lambda: time(share))
    play(contest)
    assert contest.verdict is not None
    assert contest.verdict.is_faster is is_faster
    assert contest([]) == ["champion"]


def test_a_large_difference_is_found_at_the_first_look() -> None:
    contest = contest_of(lambda: 2.0, lambda: 1.0)
    assert play(contest) == 2 * (LOOKS[0] + COLD)
    assert contest.verdict is not None
    assert contest.verdict.ratio == 0.5


def test_inputs_that_come_in_turns_are_no_difference() -> None:
    sizes = iter([1.0, 5.0, 2.0, 9.0] * 1000)
    contest = contest_of(lambda: next(sizes), lambda: next(sizes))
    play(contest)
    assert contest.verdict is not None
    assert not contest.verdict.is_faster


def test_equal_callables_win_by_chance_at_most_as_often_as_promised() -> None:
    noise, won = random.Random(1), 0
    for _ in range(300):
        differences = [noise.gauss(0, 0.1) for _ in range(LOOKS[-1])]
        verdict = next(filter(None, (judge(differences[:count]) for count in LOOKS)))
        won += verdict.is_faster
    assert won <= 6  # 0.005 of 300 are expected


def test_a_call_that_raises_counts_for_nothing_and_raises_its_own_error() -> None:
    clock, calls = Clock(), iter(range(10_000))

    def run(inputs: list[Any]) -> list[Any]:
        clock.now += 1.0
        if next(calls) % 3 == 0:
            raise ValueError("of the program")
        return inputs

    contest = Contest(run, run, clock)
    for _ in range(300):
        try:
            contest([])
        except ValueError as error:
            assert str(error) == "of the program"
    assert len(contest._open) <= 64
    assert len(contest._differences) > 16


def test_deterministic_algorithms_keep_to_one() -> None:
    contest = contest_of(lambda: 1.0, lambda: 0.5)
    torch.use_deterministic_algorithms(True)
    try:
        assert {str(contest([])) for _ in range(100)} == {"['champion']"}
    finally:
        torch.use_deterministic_algorithms(False)
    assert contest.verdict is None


def test_the_programs_random_numbers_are_its_own() -> None:
    random.seed(5)
    state = random.getstate()
    play(contest_of(lambda: 1.0, lambda: 0.5))
    assert random.getstate() == state


def test_calls_of_several_threads() -> None:
    contest = Contest(lambda inputs: inputs, lambda inputs: inputs)
    threads = [threading.Thread(target=lambda: [contest([]) for _ in range(400)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contest._calls >= 2 * LOOKS[0]
    assert contest.verdict is not None


@given(st.lists(st.floats(-10, 10), max_size=60))
def test_the_ranks_are_those_of_their_definition(differences: list[float]) -> None:
    values = [item for item in differences if item]
    expected = 0.0
    for item in values:
        below = sum(abs(other) < abs(item) for other in values)
        rank = below + (sum(abs(other) == abs(item) for other in values) + 1) / 2
        expected += rank if item > 0 else -rank
    count = len(values)
    scale = (count * (count + 1) * (2 * count + 1) / 6) ** 0.5 or 1.0
    assert signed_rank(differences) == pytest.approx(expected / scale)
