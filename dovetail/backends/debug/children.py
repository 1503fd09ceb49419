"""Running something in a process of its own, with a time limit: a backend that hangs or crashes takes only that with it.

A child writes one JSON object per line to a file; the parent reads them as they come. What can be found by name is run by a
new interpreter, what exists in this process only (a backend registered in a notebook) by a fork of it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
Write = Callable[[Row], None]
#: How long a new interpreter may take to import torch on a busy machine, on top of the limit of the work itself.
START_SECONDS = 90.0
_PAUSE = 0.02


@dataclass(frozen=True)
class Lost:
    """How a child ended that did not finish: "crashed" or "timed out", in words, with the last lines that it wrote."""

    status: str
    problem: str

    def __str__(self) -> str:
        return f"{self.status}: {self.problem}"


class _Forked:
    """A forked process, with the part of ``subprocess.Popen``'s face that is needed here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> None:
        """Wait until it has ended."""
        while self.poll() is None:
            time.sleep(_PAUSE)


def can_fork() -> bool:
    """Whether this process can be forked: CUDA does not survive it."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()


def rows_of_module(module: str, job: Row, seconds: float) -> Iterator[Row | Lost]:
    """Run ``python -m module JOB OUTPUT`` and yield the rows it writes; a :class:`Lost` at the end if it did not finish.

    ``seconds`` is the time limit between two rows.
    """
    with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
        output, errors = Path(folder, "rows"), Path(folder, "errors")
        output.touch()
        # The child must import the package that this process runs, installed or not.
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with errors.open("wb") as stream:
            child = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(job), str(output)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )
        yield from _follow(child, output, errors, seconds, seconds + START_SECONDS)


def rows_of_fork(work: Callable[[Write], None], seconds: float) -> Iterator[Row | Lost]:
    """Run ``work(write)`` in a fork of this process, as :func:`rows_of_module` does with a module."""
    with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
        output, errors = Path(folder, "rows"), Path(folder, "errors")
        output.touch()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _work_and_exit(work, output, errors)
        yield from _follow(_Forked(pid), output, errors, seconds, seconds)


def _work_and_exit(work: Callable[[Write], None], output: Path, errors: Path) -> None:
    """The forked child: never returns, and runs no exit handlers that belong to the parent."""
    status = 1
    try:
        os.setsid()
        descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        # A test runner's handler would write every thread's stack to its own terminal.
        faulthandler.disable()
        # The threads of the parent's pool do not exist here, and waiting for them never ends.
        torch.set_num_threads(1)
        work(writer(output))
        status = 0
    except BaseException as error:  # noqa: BLE001  (the parent reads it; nothing may leave this frame)
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def writer(output: Path) -> Write:
    """A function that appends one row to the file that the parent reads."""

    def write(row: Row) -> None:
        with output.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    return write


def _follow(child: Any, output: Path, errors: Path, seconds: float, first_seconds: float) -> Iterator[Row | Lost]:
    deadline = time.monotonic() + first_seconds
    place = 0
    try:
        while True:
            # Asked before reading: what was written before the end is read below.
            status = child.poll()
            text = output.read_bytes()[place:]
            complete = text[: text.rfind(b"\n") + 1]
            place += len(complete)
            for line in complete.splitlines():
                deadline = time.monotonic() + seconds
                yield json.loads(line)
            if status == 0:
                return
            if status is not None:
                yield Lost("crashed", _how_it_ended(status, errors))
                return
            if time.monotonic() > deadline:
                yield Lost("timed out", f"took longer than {seconds:g} seconds and was stopped")
                return
            time.sleep(_PAUSE)
    finally:
        stop(child)


def stop(child: Any) -> None:
    """End a child and the compilers that it has started (they share its session)."""
    if child.poll() is None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # A fork that has not come to its setsid yet is in our own group still.
            os.kill(child.pid, signal.SIGKILL)
        child.wait()


def _how_it_ended(status: int, errors: Path) -> str:
    try:
        lines = [line for line in errors.read_text("utf-8", "replace").splitlines() if line.strip()]
    except FileNotFoundError:
        lines = []
    last = f"; its last words: {lines[-1][:300]}" if lines else ""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"the process was ended by {name}{last}"
    return f"the process exited with status {status}{last}"
