"""The files with the code that Inductor has generated for each graph, for people who want to read it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generated:
    """The code of one graph: "forward", "backward" or "inference", the file, and whether a cache had it.

    ``kept``: the key under which Dovetail's cache has the code, and the inputs that are resolved before (:class:`.job.Job`); None
    where the callable is more than that.
    """

    kind: str
    file: str
    was_cached: bool
    kept: tuple[str, list[int]] | None = None


#: By the fake mode of the capture, which its graphs share: no graph and no code is kept alive by this table.
_BY_CAPTURE: weakref.WeakKeyDictionary[Any, list[Generated]] = weakref.WeakKeyDictionary()


def note(fake_mode: Any, generated: Generated) -> None:
    """Remember where the code of a graph is."""
    _BY_CAPTURE.setdefault(fake_mode, []).append(generated)


def code_of(fake_mode: Any) -> list[Generated]:
    """The code of the graphs of a capture, in the order in which they were compiled."""
    return list(_BY_CAPTURE.get(fake_mode, ()))


@contextlib.contextmanager
def aside(fake_mode: Any) -> Iterator[list[Generated]]:
    """Notes made in the block go to the list that it is given: code that may never be used."""
    before = _BY_CAPTURE.pop(fake_mode, None)
    found = _BY_CAPTURE[fake_mode] = []
    try:
        yield found
    finally:
        if before is None:
            del _BY_CAPTURE[fake_mode]
        else:
            _BY_CAPTURE[fake_mode] = before
