"""State that all pieces of one recorder share: the lock, stable addresses, recordings to release."""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from collections import Counter, deque
from typing import Any

from dovetail.backends.cudagraphs.recorder import Recorder, Recording
from dovetail.backends.cudagraphs.slots import Slot
from dovetail.errors import RecordingWarning


class Shared:
    """The shared state of one recorder. Graphs of a step share memory, so ``lock`` lets one of them run at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        #: Memory of results that are handed out in place, and of parameters and buffers: users by address.
        self.kept: Counter[int] = Counter()
        self.static: Counter[int] = Counter()
        self._unused: deque[tuple[Recording, tuple[int, ...], tuple[int, ...]]] = deque()

    def is_stable(self, address: int) -> bool:
        """Return whether the memory at this address stays there from call to call."""
        return address in self.kept or address in self.static

    def remember(self, slot: Slot) -> None:
        """Count the addresses that a recording relies on until it is dropped."""
        self.kept.update(slot.kept)
        self.static.update(slot.static)

    def drop(self, slot: Slot) -> None:
        """Have a recording released by the next :meth:`collect`; finalizers may call this in any thread."""
        # Not the slot itself, which holds the buffers.
        self._unused.append((slot.recording, slot.kept, slot.static))

    def collect(self) -> None:
        """Release dropped recordings. Never call this while recording: freeing a graph would end that."""
        while self._unused:
            recording, kept, static = self._unused.popleft()
            recording.release()
            # Subtraction of counters drops counts of zero.
            self.kept -= Counter(kept)
            self.static -= Counter(static)


_by_recorder: weakref.WeakKeyDictionary[Any, Shared] = weakref.WeakKeyDictionary()
_pieces: weakref.WeakSet[Any] = weakref.WeakSet()
_warned: set[str] = set()


def shared_by(recorder: Recorder) -> Shared:
    """Return the one :class:`Shared` of a recorder."""
    return _by_recorder.setdefault(recorder, Shared())


def register_piece(piece: Any) -> None:
    """Have a piece's recordings released at exit at the latest."""
    _pieces.add(piece)


def release_recordings() -> None:
    """Release all recordings now; compiled functions continue, and record again when they are called.

    Call it before memory is needed for something else, or before a process group is destroyed.

    >>> release_recordings()
    """
    for piece in list(_pieces):
        piece.release()
    for shared in list(_by_recorder.values()):
        with shared.lock:
            shared.collect()


atexit.register(release_recordings)


def warn(text: str, advice: str, *, once: bool | str = False) -> None:
    """Warn the user; ``once`` suppresses a second warning with the same text, or about the subject that it names."""
    if once:
        key = once if isinstance(once, str) else text
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(f"{text}\n  what to do: {advice}", RecordingWarning, stacklevel=3)
