"""A child process that answers lines of JSON on a pipe, so that several children can take turns."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class WorkerError(RuntimeError):
    """The error of a child that ended before its work was done; the message holds its status and its last line."""


class Worker:
    """The parent's end of the pipe to one child."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def ask(self, question: object) -> dict[str, Any]:
        """Send one line of JSON and wait for the answer."""
        assert self._process.stdin is not None
        # If the child has ended, reading its answer says so.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._read()

    def finish(self) -> dict[str, Any]:
        """Close the pipe and read the last answer."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = "".join(said[-1:])[:300]
            raise WorkerError(f"the process ended with status {status}; see {self._log}: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def start_worker(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[Worker]:
    """Start a child whose other output goes to ``log``; it is gone when the block ends."""
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        try:
            yield Worker(process, log)
        finally:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
