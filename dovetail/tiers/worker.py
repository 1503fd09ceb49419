"""The process that compiles in the background: ``python -m dovetail.tiers.worker FOLDER PARENT``.

It takes jobs from a folder, in the order of their numbers. ``N.job`` is the job as JSON; the worker writes ``N.begun`` when it
begins it and ``N.done`` at its end, each under another name first. What it makes are the entries of the compiler's own caches on
disk, where the parent finds them. It ends with its parent, and takes the compilers that it has started with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pkgutil
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dovetail.cache.unportable import UnportableError
from dovetail.tiers.branches import reason_of

#: Between two looks at the folder, and at the parent.
_PAUSE, _WATCH_PAUSE = 0.02, 0.5
#: A worker without work ends after so many seconds; the next job starts another one.
IDLE_SECONDS = 300.0


def write_whole(path: Path, content: str) -> None:
    """Write a file such that nobody ever reads half of it."""
    beside = path.with_suffix(".part")
    beside.write_text(content, encoding="utf-8")
    beside.replace(path)


def _end_with_parent(parent: int, folder: Path) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_PAUSE)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _numbers(folder: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return sorted(int(path.stem) for path in folder.glob("*.job"))
    return []


def _work(folder: Path, number: int) -> None:
    """Do one job; whatever is wrong with it is said in the file at its end."""
    answer: dict[str, Any]
    start = time.monotonic()
    try:
        job = json.loads((folder / f"{number}.job").read_text("utf-8"))

        def said(text: str) -> None:
            write_whole(folder / f"{number}.begun", text)

        said("")
        if hasattr(signal, "alarm"):
            signal.alarm(max(1, int(job["seconds"])))
        pkgutil.resolve_name(job["place"])(job, said)
        answer = {"status": "compiled", "seconds": time.monotonic() - start}
    except Exception as error:  # noqa: BLE001  (whatever a compiler may raise)
        answer = {"status": "unfit" if isinstance(error, UnportableError) else "failed", "reason": reason_of(error)}
    finally:
        if hasattr(signal, "alarm"):
            signal.alarm(0)
    write_whole(folder / f"{number}.done", json.dumps(answer))
    (folder / f"{number}.job").unlink(missing_ok=True)


def main(folder: Path, parent: int, niceness: int, first: str) -> None:
    """Call the function at the place ``first``, which imports what jobs need; then work.

    It ends when there is nothing to do for long, when the folder is gone, or the parent.
    """
    threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(niceness)
    # To look for garbage took a fifth of a job's time.
    gc.set_threshold(500_000, 100, 100)
    with contextlib.suppress(Exception):  # what is missing is said by the first job
        pkgutil.resolve_name(first)()
    gc.freeze()
    idle_since = time.monotonic()
    while folder.is_dir() and time.monotonic() - idle_since < IDLE_SECONDS:
        numbers = _numbers(folder)
        if not numbers:
            time.sleep(_PAUSE)
            continue
        _work(folder, numbers[0])
        idle_since = time.monotonic()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
