"""Work in a process of its own, with a time limit: a backend that hangs or crashes takes only that process with it.

A child writes one JSON object per line to a file; the parent reads them as they come. A new interpreter runs what can be
found by name, a fork of this process what exists only here (a backend registered in a notebook).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import pkgutil
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
#: Returns the exit status of a child, None as long as it runs.
Poll = Callable[[], int | None]
#: The time that a new interpreter may take to import torch on a busy machine, on top of the limit of the work itself.
START_SECONDS = 90.0
_PAUSE = 0.02


@dataclass(frozen=True)
class Lost:
    """The end of a child that did not finish: "crashed" or "timed out", and the problem with the child's last words."""

    status: str
    problem: str

    def __str__(self) -> str:
        return f"{self.status}: {self.problem}"


def can_fork() -> bool:
    """Return whether this process can be forked: CUDA does not survive it."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()


def rows_of_interpreter(place: str, job: Row, seconds: float) -> Iterator[Row | Lost]:
    """Call ``function(job, write)`` (``place``: ``module:function``) in a new interpreter and yield the rows it writes.

    ``seconds`` is the time limit between two rows; a :class:`Lost` is the last row if the child did not finish.
    """

    def start(output: Path, errors: Path) -> tuple[int, Poll]:
        # The child must import the package that this process runs, installed or not, and no other one from the folder it starts in.
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with errors.open("wb") as stream:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, place, json.dumps(job), str(output)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        return child.pid, child.poll

    return _rows(start, seconds, seconds + START_SECONDS)


def rows_of_fork(work: Callable[[Write], None], seconds: float) -> Iterator[Row | Lost]:
    """Run ``work(write)`` in a fork of this process, as :func:`rows_of_interpreter` does in a new one."""

    def start(output: Path, errors: Path) -> tuple[int, Poll]:
        child = multiprocessing.get_context("fork").Process(target=_run_fork, args=(work, output, errors))
        child.start()
        assert child.pid is not None
        return child.pid, lambda: child.exitcode

    return _rows(start, seconds, seconds)


def _run_fork(work: Callable[[Write], None], output: Path, errors: Path) -> None:
    os.setsid()
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    # Python's own streams may belong to a test runner.
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)
    # A test runner's handler would write every thread's stack to its own terminal.
    faulthandler.disable()
    # The threads of the parent's pool do not exist here, and waiting for them never ends.
    torch.set_num_threads(1)
    work(writer(output))


def writer(output: Path) -> Write:
    """Return a function that appends one row to the file that the parent reads."""

    def write(row: Row) -> None:
        with output.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    return write


def _rows(
    start: Callable[[Path, Path], tuple[int, Poll]], seconds: float, first_seconds: float
) -> Iterator[Row | Lost]:
    """Start a child that writes to two files, and yield its rows; it is gone when the iterator ends."""
    with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
        output, errors = Path(folder, "rows"), Path(folder, "errors")
        output.touch()
        pid, poll = start(output, errors)
        deadline = time.monotonic() + first_seconds
        try:
            with output.open("rb") as stream:
                status, unfinished = None, b""
                while status is None:
                    time.sleep(_PAUSE)
                    # The status is read before the file, so that rows written just before the end are not missed.
                    status = poll()
                    *complete, unfinished = (unfinished + stream.read()).split(b"\n")
                    for line in complete:
                        deadline = time.monotonic() + seconds
                        yield json.loads(line)
                    if status is None and time.monotonic() > deadline:
                        yield Lost("timed out", f"took longer than {seconds:g} seconds and was stopped")
                        return
            if status != 0:
                yield Lost("crashed", _how_it_ended(status, errors))
        finally:
            _stop(pid, poll)


def _stop(pid: int, poll: Poll) -> None:
    """End a child and the compilers that it has started (they share its session)."""
    while poll() is None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # A fork that has not called setsid yet is still in the parent's group.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE)


def _how_it_ended(status: int, errors: Path) -> str:
    text = errors.read_text("utf-8", "replace") if errors.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    last = f"; its last words: {lines[-1][:300]}" if lines else ""
    if status >= 0:
        return f"the process exited with status {status}{last}"
    names = {item.value: item.name for item in signal.Signals}
    return f"the process was ended by {names.get(-status, f'signal {-status}')}{last}"


if __name__ == "__main__":
    pkgutil.resolve_name(sys.argv[1])(json.loads(sys.argv[2]), writer(Path(sys.argv[3])))
