"""Jobs for a real background process: each stands for something that a compiler may do."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.cache.unportable import UnportableError
from dovetail.tiers.branches import can_branch, side_by_side
from dovetail.tiers.worker import write_whole

HERE = __name__
Said = Callable[[str], None]


def job(name: str, **given: Any) -> dict[str, Any]:
    """A job that calls the function of this name here."""
    return {"place": f"{HERE}:{name}", **given}


def nothing() -> None:
    """What the process does before its first job."""


def write(job: dict[str, Any], said: Said) -> None:
    """Leave a file, with the niceness of the process."""
    said("half-way")
    Path(job["path"]).write_text(str(os.nice(0)))


def fail(job: dict[str, Any], said: Said) -> None:
    """A compiler that refuses."""
    raise RuntimeError("no such instruction\nand more lines")


def refuse(job: dict[str, Any], said: Said) -> None:
    """A graph that means something else here."""
    raise UnportableError("other switches")


def die(job: dict[str, Any], said: Said) -> None:
    """A compiler that crashes."""
    os._exit(3)


def hang(job: dict[str, Any], said: Said) -> None:
    """A compiler that never ends, with a child."""
    child = subprocess.Popen(["sleep", "600"])
    Path(job["path"]).write_text(str(child.pid))
    time.sleep(600)


def in_branches(job: dict[str, Any], said: Said) -> None:
    """Two tasks side by side: both write who they are, and the second does what the job says then."""
    tasks = [functools.partial(_task, Path(job["path"]), number, job["then"]) for number in range(2)]
    assert can_branch()
    for error in side_by_side(tasks, lambda count: said(f"{count} of 2")):
        if error is not None:
            raise error


def _task(folder: Path, number: int, then: str) -> None:
    other = folder / str(1 - number)
    write_whole(folder / str(number), str(os.getpid()))
    while not other.exists():
        time.sleep(0.01)
    if number:
        {"end": lambda: None, "hang": lambda: time.sleep(600), "crash": lambda: os.abort(), **_RAISES}[then]()


def _raise(error: Exception) -> None:
    raise error


_RAISES = {
    "fail": lambda: _raise(RuntimeError("no such instruction\nand more lines")),
    "refuse": lambda: _raise(UnportableError("other switches")),
}
