"""Forks of the background process, one for each graph of a job, so that the graphs of a job are compiled at the same time.

A fork has all modules of the process that it comes from, which compiles nothing itself: it stays as it was when it was ready. So a
compiler that crashes takes nothing with it, and what it must not assume after a failure, the next fork has never heard of.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from dovetail.cache.unportable import UnportableError

_PAUSE = 0.5


class BranchError(Exception):
    """The work of a fork has failed; the text says why, with the name of the error."""


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return lines[0][:300] if isinstance(error, BranchError) else f"{type(error).__name__}: {lines[0][:300]}"


def can_branch() -> bool:
    """Whether this process can be forked: Linux, and no thread beside the main one but the one that looks for the parent.

    Another one may hold a lock, which nobody would give back in the fork.
    """
    return sys.platform == "linux" and threading.active_count() <= 2 and len(os.sched_getaffinity(0)) > 1


class Branch:
    """A fork of this process that does one thing and ends."""

    def __init__(self, task: Callable[[], object], niceness: int = 0) -> None:
        self._answer, writer = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _do(task, writer, parent, niceness)
        os.close(writer)

    def leave(self) -> None:
        """Nobody will wait for its end."""
        os.close(self._answer)

    def wait(self) -> None:
        """Wait for its end; raises :class:`UnportableError` where it has, and :class:`BranchError` for any other failure."""
        with open(self._answer, "rb") as stream:
            content = stream.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        try:
            kind, reason = json.loads(content)
        except ValueError:
            raise BranchError(f"its process has ended with status {status}") from None
        if kind == "unfit":
            raise UnportableError(reason)
        if kind != "compiled":
            raise BranchError(reason)


def _do(task: Callable[[], object], writer: int, parent: int, niceness: int) -> NoReturn:
    """The life of a fork. Nothing of its parent's is tidied up at its end."""
    answer: Any = ["failed", "it was interrupted"]
    try:
        os.nice(niceness)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        task()
        answer = ["compiled", ""]
    except UnportableError as error:
        answer = ["unfit", str(error)]
    except BaseException as error:  # noqa: BLE001  (whatever a compiler may raise)
        answer = ["failed", reason_of(error)]
    finally:
        with contextlib.suppress(OSError):
            os.write(writer, json.dumps(answer).encode())
        os._exit(0)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PAUSE)
    os._exit(1)


def side_by_side(tasks: Sequence[Callable[[], object]], done: Callable[[int], object]) -> list[Exception | None]:
    """Do all tasks in forks, as many at once as there are cores; what each has raised. ``done`` hears how many have ended."""
    errors: list[Exception | None] = []
    running: list[Branch] = []
    waiting = iter(tasks)
    while len(errors) < len(tasks):
        while len(running) < len(os.sched_getaffinity(0)) and (task := next(waiting, None)) is not None:
            running.append(Branch(task))
        done(len(errors))
        try:
            running.pop(0).wait()
            errors.append(None)
        except (BranchError, UnportableError) as error:
            errors.append(error)
    return errors
