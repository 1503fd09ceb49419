"""Messages about long work while it happens: one line after three seconds, one at the end, and in a terminal how far it is.

``DOVETAIL_PROGRESS=0`` says nothing, ``1`` writes plain lines to the standard error stream. Without either, a terminal gets one
line that is written anew, and everything else the logger ``dovetail``, at level INFO, which is silent unless a program wants to
hear it. The thread that waits three seconds writes a line and does nothing else: torch does not know of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

#: Seconds of work below which no line is printed.
SECONDS = 3.0
SWITCH = "DOVETAIL_PROGRESS"
logger = logging.getLogger("dovetail")


def _is_terminal() -> bool:
    """Whether a line can be written anew; a dumb terminal, such as an editor's, cannot."""
    if os.environ.get("PYTEST_CURRENT_TEST") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(sys.stderr, "isatty", bool)())


def say(text: str, *, is_last: bool = True) -> None:
    """Say one thing; in a terminal, what is not the last word is overwritten by the next."""
    switch = os.environ.get(SWITCH, "")
    if switch == "0":
        return
    line = f"dovetail: {text}"
    with contextlib.suppress(Exception):  # a stream that is closed, or that cannot write a letter
        if switch:
            print(line, file=sys.stderr, flush=True)
        elif _is_terminal():
            print(f"\r\x1b[K{line}", file=sys.stderr, end="\n" if is_last else "", flush=True)
        else:
            logger.info(text)


class Progress:
    """Something that may take long, from its begin to its end; safe to be told so from any thread.

    ``how_far`` is asked for more words, when there is something to say.
    """

    def __init__(self, what: str, how_far: Callable[[], str | None] = lambda: None) -> None:
        self._what = what
        self._how_far = how_far
        self._start = time.monotonic()
        self._is_said = False
        self._said_far: str | None = None
        self._next = self._start + SECONDS

    def look(self) -> None:
        """Say that it goes on, where it has taken long and there is something new."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SECONDS
        far = self._how_far()
        if self._is_said and far == self._said_far:
            return
        self._is_said, self._said_far = True, far
        say(f"{self._what}{f', {far}' if far else ''} ({now - self._start:.0f} s so far)", is_last=False)

    def end(self, how: str = "done") -> None:
        """Say that it has ended, where it was said that it had begun."""
        if self._is_said:
            say(f"{self._what}: {how} after {time.monotonic() - self._start:.1f} s")


@contextlib.contextmanager
def stage(what: str) -> Iterator[None]:
    """Say what happens in the block, where it takes longer than three seconds."""
    if os.environ.get(SWITCH) == "0":
        yield
        return
    progress = Progress(what)
    timer = threading.Timer(SECONDS + 0.01, progress.look)
    timer.daemon = True
    timer.start()
    how = "failed"
    try:
        yield
        how = "done"
    finally:
        timer.cancel()
        progress.end(how)
