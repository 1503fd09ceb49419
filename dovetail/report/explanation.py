"""What ``dovetail.explain`` returns: a call's entries, graph breaks and events, as text and as a page of a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.face.warnings import count

#: Graph breaks and events that are printed; all of them are in the fields.
_MOST_SHOWN = 50


@dataclass(frozen=True, repr=False)
class Explanation:
    """What Dovetail would do with a call, and why.

    ``entries`` says of each compiled entry whether its guards hold, ``breaks`` where a graph ends before the function does, with
    the number of entries that go on there, ``events`` what was decided so far.

    >>> Explanation(("hit",), ("capture 3.1 ms",), ("f (going on at line 3): 2 entries after it",))
    1 compiled entry
      entry 0: hit
    1 graph break
      f (going on at line 3): 2 entries after it
    1 event
      capture 3.1 ms
    """

    entries: tuple[str, ...]
    events: tuple[str, ...]
    breaks: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [count(self.entries, "compiled entry")]
        lines += [f"  entry {number}: {text}" for number, text in enumerate(self.entries)]
        for items, one in ((self.breaks, "graph break"), (self.events, "event")):
            if items:
                left_out = len(items) - _MOST_SHOWN
                lines.append(count(items, one) + (f", the last {_MOST_SHOWN} of them" if left_out > 0 else ""))
                lines += [f"  {item}" for item in items[-_MOST_SHOWN:]]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same for a notebook: entries and graph breaks as lists, events to be opened."""
        parts = [_list("compiled entry", self.entries), _list("graph break", self.breaks)]
        events = _list("event", self.events)
        return "".join(parts) + (f"<details><summary>events</summary>{events}</details>" if events else "")


def _list(one: str, items: Sequence[str]) -> str:
    rows = "".join(f"<li><pre>{html.escape(item)}</pre></li>" for item in items)
    return f"<p>{count(items, one)}</p><ol start='0'>{rows}</ol>" if items else ""
