"""The line of the program that was running when an autograd node was made."""

from __future__ import annotations

import bisect
from typing import Any


class LineTable:
    """Lines of the program by sequence numbers of autograd nodes: from each number on, nodes belong to one line.

    >>> table = LineTable()
    >>> table.add(3, "line 1")
    >>> table.add(7, "line 2")
    >>> table.find(2), table.find(6), table.find(7)
    (None, 'line 1', 'line 2')
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._lines: list[Any] = []

    def add(self, start: int, line: Any) -> None:
        """Let nodes belong to ``line`` from sequence number ``start`` on."""
        if self._starts and self._starts[-1] == start:
            self._lines[-1] = line
        else:
            self._starts.append(start)
            self._lines.append(line)

    def find(self, number: int) -> Any:
        """The line of the node with this sequence number, or None."""
        position = bisect.bisect_right(self._starts, number) - 1
        return self._lines[position] if position >= 0 else None
