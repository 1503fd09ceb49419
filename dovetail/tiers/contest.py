"""Two callables of one graph take turns on a program's own calls until their times tell which one is faster.

Two calls that follow each other are a pair, in a random order, so that what slows the machine down for a while, and inputs that
come in turns, meet both alike. A pair gives the logarithm of the ratio of its times. After 16, 64 and 256 pairs Wilcoxon's
signed-rank test (F. Wilcoxon, *Individual comparisons by ranking methods*, 1945) looks at them: it asks nothing of how times are
distributed, and one call that waited for the disk weighs as much as any other.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FlatCallable = Callable[[list[Any]], list[Any]]
#: The numbers of pairs at which the test looks.
LOOKS = (16, 64, 256)
#: The first pairs meet cold caches.
COLD = 2
#: How often a challenger that is no faster may win, over all looks of one contest.
ERROR = 0.01
#: The least saving of a challenger, as a share of the time.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Verdict:
    """Whether the challenger is faster; ``ratio`` is its time over the champion's, ``probability`` that of such ranks by chance."""

    is_faster: bool
    ratio: float
    probability: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.ratio:.3f} of the time (p = {self.probability:.1g}, {self.pairs} pairs of calls)"


class Contest:
    """Runs the one or the other; ``verdict`` is None as long as the times do not tell.

    >>> times = iter([0.0, 1.0] * 300)
    >>> contest = Contest(lambda inputs: inputs, lambda inputs: inputs, clock=lambda: next(times))
    >>> while contest.verdict is None:
    ...     _ = contest([])
    >>> contest.verdict.is_faster, contest.verdict.ratio
    (False, 1.0)
    """

    def __init__(
        self, champion: FlatCallable, challenger: FlatCallable, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.champion = champion
        self.challenger = challenger
        self.verdict: Verdict | None = None
        self._clock = clock
        # The program's random numbers are not touched.
        self._random = random.Random(0)
        self._calls = 0
        self._challenger_begins = False
        self._open: dict[int, tuple[bool, float]] = {}
        self._differences: list[float] = []
        self._lock = threading.Lock()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the callable whose turn it is. A call that raises counts for nothing."""
        if self.verdict is not None or torch.are_deterministic_algorithms_enabled():
            return self.champion(inputs)
        with self._lock:
            pair, place = divmod(self._calls, 2)
            self._calls += 1
            if not place:
                self._challenger_begins = self._random.random() < 0.5
            challenges = self._challenger_begins is not bool(place)
        start = self._clock()
        results = (self.challenger if challenges else self.champion)(inputs)
        self._note(pair, challenges, self._clock() - start)
        return results

    def _note(self, pair: int, challenges: bool, seconds: float) -> None:
        with self._lock:
            other = self._open.pop(pair, None)
            if other is None:
                self._open[pair] = (challenges, seconds)
                # A pair whose other call has raised, or is still running in another thread.
                self._open.pop(pair - 64, None)
                return
            if pair < COLD or other[0] is challenges or not (seconds and other[1]):
                return
            ratio = seconds / other[1] if challenges else other[1] / seconds
            self._differences.append(math.log(ratio))
            if len(self._differences) in LOOKS and self.verdict is None:
                self.verdict = judge(self._differences)


def judge(differences: Sequence[float]) -> Verdict | None:
    """The verdict of logarithms of ratios after one of the looks; None where more are needed."""
    count = len(differences)
    ratio = math.exp(statistics.median(differences))
    score = signed_rank(differences)
    probability = 2 * statistics.NormalDist().cdf(-abs(score))
    is_sure = probability < ERROR / len(LOOKS)
    if not is_sure and count < LOOKS[-1]:
        return None
    return Verdict(is_sure and score < 0 and ratio <= 1 - LEAST_GAIN, ratio, probability, count)


def signed_rank(differences: Sequence[float]) -> float:
    """Wilcoxon's statistic as a standard normal score: below zero where the differences are. Differences of zero are left out.

    >>> signed_rank([0.0, 0.0])
    0.0
    >>> signed_rank([-1.0, -2.0, -3.0, -4.0]) < -1.8
    True
    """
    ordered = sorted((item for item in differences if item), key=abs)
    count = len(ordered)
    if not count:
        return 0.0
    total, place = 0.0, 0
    while place < count:
        end = place
        while end < count and abs(ordered[end]) == abs(ordered[place]):
            end += 1
        rank = (place + 1 + end) / 2  # the mean of the ranks of equal differences
        total += sum(math.copysign(rank, item) for item in ordered[place:end])
        place = end
    return total / math.sqrt(count * (count + 1) * (2 * count + 1) / 6)
