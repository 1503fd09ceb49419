"""The parent's side of the background process: one for all compiled functions, started with the first job."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail.tiers.worker import write_whole


def number_of(name: str, default: float) -> float:
    """A number from the environment; what is none counts as missing.

    >>> number_of("DOVETAIL_NO_SUCH_NUMBER", 5)
    5
    """
    with contextlib.suppress(ValueError):
        return float(os.environ.get(name, default))
    return default


#: A job may take so long before its process is stopped.
SECONDS = number_of("DOVETAIL_TIERS_SECONDS", 900)
#: How much the background gives way to a program that uses all cores.
NICENESS = int(number_of("DOVETAIL_TIERS_NICE", 15))
#: For each second that such a program computes, it leaves the cores to the background for so many. While both compute at once, the
#: threads of one operator wait for each other's turns: on two cores, a GPT's steps took 4.0 s instead of 0.1 until its kernels were
#: there, which was after 32 s; in turns of 1 to 2 the steps take 0.36 s, and the kernels 20 s.
REST = number_of("DOVETAIL_TIERS_REST", 2.0)
#: The longest of these pauses, and the least work that is worth one, in seconds.
_LONGEST_REST, _SHORTEST_WORK = 5.0, 0.02
#: A process that is killed again and again is not started any more.
MOST_STARTS = 8
#: Between two looks at what a job has come to; a look is a question to the file system.
_PAUSE = 0.05
_MODULE = "dovetail.tiers.worker"


@dataclass(frozen=True)
class Answer:
    """The end of a job: "compiled", "failed", "unfit" (this process must compile the graphs itself) or "left"
    (this process is a fork of the one that has given the job).
    """

    status: str
    reason: str = ""
    seconds: float = 0.0


class Worker:
    """One background process and the folder with its jobs; ``first`` is the place of a function that it calls at its start."""

    def __init__(self, first: str = "dovetail.tiers.compiling:prepare") -> None:
        self._first = first
        self.folder = Path(tempfile.mkdtemp(prefix="dovetail-tiers-"))
        self._owner = os.getpid()
        self._next_number = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._rested_at = time.process_time()
        atexit.register(self.stop)

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it, and is no fork of the one that has."""
        return os.getpid() == self._owner

    @property
    def pid(self) -> int | None:
        """The process, where one was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process unless it runs; raises OSError where none can be started."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._starts += 1
            if self._starts > MOST_STARTS:
                raise OSError("the background process has ended too often")
            if not sys.executable or getattr(sys, "frozen", False):
                raise OSError("this program is not run by a Python interpreter that could be started again")
            # It must import the package that this process runs, installed or not, and nothing from the folder that it starts in.
            paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            given = [str(self.folder), str(os.getpid()), str(NICENESS), self._first]
            command = [sys.executable, "-P", "-W", "ignore", "-m", _MODULE, *given]
            with (self.folder / "words").open("wb") as words:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                    # A session of its own would be a group of its own for Linux (autogroup), and its niceness without effect here.
                    process_group=0,
                )

    def submit(self, job: dict[str, Any]) -> Job:
        """Give it a job; raises OSError where that is impossible (no space left, say)."""
        self.start()
        with self._lock:
            self._next_number += 1
            number = self._next_number
            self._rested_at = time.process_time()
        text = json.dumps({**job, "seconds": SECONDS})
        write_whole(self.folder / f"{number}.job", text)
        return Job(self, number)

    def let_it_work(self) -> None:
        """Sleep in proportion to what this process has computed since the last time, where its threads take all cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        worked = (time.process_time() - self._rested_at) / cores
        if worked >= _SHORTEST_WORK and torch.get_num_threads() >= cores:
            time.sleep(min(REST * worked, _LONGEST_REST))
        if worked >= _SHORTEST_WORK:
            self._rested_at = time.process_time()

    def exit_status(self) -> int | None:
        """The status of the process that has ended, 0 for one that was ended by us; None while it runs."""
        process = self._process
        return 0 if process is None else process.poll()

    def kill(self) -> None:
        """End the process and the compilers that it has started; takes no lock, so that a finalizer may call it."""
        process = self._process
        if process is None or not self.is_ours:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def reap(self) -> None:
        """End the process and wait for it."""
        self.kill()
        if self._process is not None and self.is_ours:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            self._process = None

    def stop(self) -> None:
        """End the process; nothing is left of it."""
        if self.is_ours:
            self.reap()
            shutil.rmtree(self.folder, ignore_errors=True)

    def last_words(self) -> str:
        """The last line that the process has written."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "words").read_text("utf-8", "replace").splitlines()
            return next((f"; its last words: {line[:200]}" for line in reversed(lines) if line.strip()), "")
        return ""


class Job:
    """Something that the background process was asked to do."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker = worker
        self._number = number
        self._next_look = 0.0
        self._begun: float | None = None

    def _file(self, kind: str) -> Path:
        return self._worker.folder / f"{self._number}.{kind}"

    def let_it_work(self) -> None:
        """Leave the cores to it for a while, as often as this process uses all of them."""
        self._worker.let_it_work()

    @property
    def stage(self) -> str | None:
        """How far it is, in words; None before it has begun."""
        with contextlib.suppress(OSError):
            return self._file("begun").read_text("utf-8")
        return None

    def answer(self) -> Answer | None:
        """The end of the job; None while it is not done. Cheap: it looks a few times a second only."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _PAUSE
        if not self._worker.is_ours:
            return Answer("left", "the process is a fork of the one that compiles in the background")
        # The status is read before the file, so that a file written just before the end is not missed.
        status = self._worker.exit_status()
        if self._file("done").exists():
            return self._read()
        has_begun = self._file("begun").exists()
        if has_begun and self._begun is None:
            self._begun = now
        if status is not None:
            return self._after_end(status, has_begun)
        if self._begun is not None and now - self._begun > SECONDS + 5:
            self._worker.reap()
            return Answer("failed", f"it took longer than {SECONDS:g} seconds and was stopped")
        return None

    def _read(self) -> Answer:
        try:
            data = json.loads(self._file("done").read_text("utf-8"))
            return Answer(str(data["status"]), str(data.get("reason", "")), float(data.get("seconds", 0.0)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            return Answer("failed", f"its answer cannot be read ({type(error).__name__})")

    def _after_end(self, status: int, has_begun: bool) -> Answer | None:
        """The process has ended: for good for the job that it was at; another process does the others."""
        words = self._worker.last_words()
        self._worker.reap()
        if not has_begun and self._file("job").exists() and status in (0, -signal.SIGKILL, -signal.SIGALRM):
            with contextlib.suppress(OSError):
                self._worker.start()
                return None
        self._file("job").unlink(missing_ok=True)
        if status == -signal.SIGALRM:
            return Answer("failed", f"it took longer than {SECONDS:g} seconds and was stopped")
        return Answer("failed", f"its process has ended with status {status}{words}")

    def cancel(self) -> None:
        """Nobody needs it any more. Takes no lock, and may be called by a finalizer."""
        if not self._worker.is_ours or self._file("done").exists():
            return
        with contextlib.suppress(OSError):
            self._file("job").unlink()
        if self._file("begun").exists():
            self._worker.kill()


_worker: Worker | None = None
_worker_lock = threading.Lock()


def worker() -> Worker:
    """The background process of this process; raises OSError where there is no place for its jobs."""
    global _worker
    with _worker_lock:
        if _worker is None or not _worker.is_ours:
            _worker = Worker()
        return _worker


def _after_fork() -> None:
    global _worker, _worker_lock
    _worker, _worker_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def stopped_at_end() -> Iterator[None]:
    """For tests: whatever process is started in the block is gone behind it."""
    global _worker
    try:
        yield
    finally:
        if _worker is not None:
            _worker.stop()
        _worker = None
