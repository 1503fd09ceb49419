"""How many rounds the loops of a program had when it was captured, to see which of these numbers change."""

from __future__ import annotations

from collections.abc import Hashable


class LoopRounds:
    """The record of one compiled function. A place is the loop in the code and how many times it was reached before.

    >>> rounds = LoopRounds()
    >>> [rounds.changes("loop", count) for count in (8, 8, 9, 8)]
    [False, False, True, True]
    """

    def __init__(self) -> None:
        self._first: dict[Hashable, int] = {}
        self._changing: set[Hashable] = set()

    def changes(self, place: Hashable, count: int) -> bool:
        """Note the rounds of a loop; returns whether another number of them was seen at any time."""
        if self._first.setdefault(place, count) != count:
            self._changing.add(place)
        return place in self._changing
