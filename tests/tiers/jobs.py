"""Jobs for a real background process: each stands for something that a compiler may do."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.tiers.unportable import UnportableError

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
