"""What all parts that one recorder has recorded share: the lock, addresses known to be stable, recordings to give back."""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dovetail.backends.cudagraphs.recorder import Recorder, Recording
from dovetail.errors import RecordingWarning


@dataclass(frozen=True)
class Addresses:
    """Where memory lies that a recording relies on: ``kept`` is its own, ``static`` belongs to parameters and buffers."""

    kept: tuple[int, ...] = ()
    static: tuple[int, ...] = ()


class Shared:
    """One for each recorder: the graphs of a step share memory, so no two of them may run at the same time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        #: Results of recordings that are handed out where they lie, and memory of parameters and buffers, by address.
        self.kept: Counter[int] = Counter()
        self.static: Counter[int] = Counter()
        self._unused: deque[tuple[Recording, Addresses]] = deque()

    def is_stable(self, address: int) -> bool:
        """Whether what lies there stays there from call to call."""
        return address in self.kept or address in self.static

    def drop(self, recording: Recording, addresses: Addresses) -> None:
        """Give a recording back at the next good moment; may be called from a finalizer, in any thread."""
        self._unused.append((recording, addresses))

    def collect(self) -> None:
        """Give back what was dropped. Never while something is being recorded: freeing a graph would end that."""
        while self._unused:
            recording, addresses = self._unused.popleft()
            recording.release()
            _subtract(self.kept, addresses.kept)
            _subtract(self.static, addresses.static)

    def remember(self, addresses: Addresses) -> None:
        """A recording relies on these until it is dropped."""
        self.kept.update(addresses.kept)
        self.static.update(addresses.static)


def _subtract(counter: Counter[int], addresses: Iterable[int]) -> None:
    for address in addresses:
        counter[address] -= 1
        if counter[address] <= 0:
            del counter[address]


_by_recorder: weakref.WeakKeyDictionary[Any, Shared] = weakref.WeakKeyDictionary()
_parts: weakref.WeakSet[Any] = weakref.WeakSet()
_warned: set[str] = set()


def shared_by(recorder: Recorder) -> Shared:
    """The one :class:`Shared` of a recorder."""
    found = _by_recorder.get(recorder)
    if found is None:
        found = _by_recorder[recorder] = Shared()
    return found


def register_part(part: Any) -> None:
    """Have a part's recordings given back at exit at the latest."""
    _parts.add(part)


def release_recordings() -> None:
    """Give all recordings back now; compiled functions go on, and record again when they are called.

    Call it before memory is needed for something else, or before a process group is destroyed.

    >>> release_recordings()
    """
    for part in list(_parts):
        part.release()
    for shared in list(_by_recorder.values()):
        with shared.lock:
            shared.collect()


atexit.register(release_recordings)


def warn(text: str, advice: str, *, once: bool | str = False) -> None:
    """Warn the user; ``once``: not again with the same text, or about the thing that it names, in this process."""
    if once:
        key = once if isinstance(once, str) else text
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(f"{text}\n  what to do: {advice}", RecordingWarning, stacklevel=3)
