"""A report on a whole program: ``DOVETAIL_REPORT=folder python train.py``, or ``dovetail report train.py``.

The report is written when the program ends, and while it runs: a second after the first compilation, then at most every 30 seconds
where something was compiled. A program that is killed leaves one too. What is noted of a function is data; it outlives the
function, and nothing keeps a model alive.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from dovetail.events import EventLog
from dovetail.face.dispatcher import SURROUNDINGS, Dispatcher, Run
from dovetail.reports.records import FunctionRecord, short
from dovetail.reports.write import MEASURING, write

VARIABLE, MEASURE = "DOVETAIL_REPORT", "DOVETAIL_REPORT_MEASURE"
MOST_FUNCTIONS = 200
_SECONDS_BETWEEN = 30.0
#: Writing takes no more of the program's time than one part in so many.
_SHARE = 50


class Watcher:
    """Notes all compilations of this process, and writes them to ``targets()``; ``measure``: times each before its first run."""

    def __init__(self, targets: Callable[[], list[Path]], measure: bool = False) -> None:
        self._targets = targets
        self._seconds = MEASURING if measure else 0.0
        self._begin()
        SURROUNDINGS.append(self.around)
        atexit.register(self.write)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Also in a forked process: the parent's compilations are in the parent's report."""
        self._records: dict[EventLog, FunctionRecord] = {}
        self._left_out = 0
        self._lock = threading.RLock()
        self._pause = 1.0
        self._timer: threading.Timer | None = None
        self._is_on = True
        self._error: BaseException | None = None
        self._ends_later: Finalize | None = None

    @property
    def has_records(self) -> bool:
        """Whether anything was compiled so far."""
        return bool(self._records)

    def ended_with(self, error: BaseException) -> None:
        """Say in the report that the program has ended with an error."""
        self._error = error

    def around(self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
        """Compile the call as without a report, then note the result."""
        if not self._is_on:
            return None
        # Hooks after this one, from rules that were loaded later, decide first.
        later = SURROUNDINGS[SURROUNDINGS.index(self.around) + 1 :]
        run = next(filter(None, (one(dispatcher, args, kwargs) for one in later)), None)
        run = run or dispatcher.decide(args, kwargs)
        self._safely(lambda: self._note(dispatcher))

        def run_and_note() -> Any:
            try:
                return run()
            finally:
                # A call that runs eagerly gets its entry while it runs.
                self._safely(lambda: self._note(dispatcher))

        return run_and_note

    def _note(self, dispatcher: Dispatcher) -> None:
        with self._lock:
            record = self._records.get(dispatcher.events)
            if record is None:
                if len(self._records) >= MOST_FUNCTIONS:
                    self._left_out += 1
                    return
                record = self._records[dispatcher.events] = FunctionRecord.begun(dispatcher, self._seconds)
                if not self._ends_later and multiprocessing.parent_process() is not None:
                    # The processes of multiprocessing end without atexit.
                    self._ends_later = Finalize(None, self.write, exitpriority=1)
            record.look(dispatcher)
            if self._timer is None:
                self._timer = threading.Timer(self._pause, self.write)
                self._timer.daemon = True
                self._timer.start()

    def write(self) -> None:
        """Write the report as it is now; a process that has compiled nothing writes none."""
        with self._lock:
            if not self._records or not self._is_on:
                return
            begin, self._timer = time.monotonic(), None
            self._safely(self._write)
            self._pause = max(_SECONDS_BETWEEN, _SHARE * (time.monotonic() - begin))

    def _write(self) -> None:
        error = self._error or getattr(sys, "last_value", None)
        ended = "" if error is None else f"ended with {type(error).__name__}: {short(error)}"
        for path in self._targets():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, self._records.values(), self._left_out, ended)

    def _safely(self, act: Callable[[], None]) -> None:
        """A report that fails says so once, and the program goes on."""
        try:
            act()
        except Exception as error:  # noqa: BLE001  (the program is worth more than its report)
            self._is_on = False
            warnings.warn(
                f"no report is written any more: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2
            )


def cannot_write(folder: Path) -> str:
    """Why no report can be written to a folder, which is made where it is not there; empty where one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"no report is written, because the folder cannot be made: {error}"
    return "" if os.access(folder, os.W_OK) else f"no report is written, because {folder} is not writable"


def watch(folder: str) -> Watcher | None:
    """Write reports of this process and those that it forks to a folder; None, with a warning, where that cannot be."""
    place = Path(folder).absolute()
    if problem := cannot_write(place):
        warnings.warn(f"{VARIABLE}={folder}: {problem}", RuntimeWarning, stacklevel=2)
        return None

    def target() -> list[Path]:
        script = Path(sys.argv[0] if sys.argv else "").stem or "python"
        rank = f"-rank{os.environ['RANK']}" if "RANK" in os.environ else ""
        return [Path(place, f"{script}{rank}-{os.getpid()}.{kind}") for kind in ("html", "json")]

    return Watcher(target, os.environ.get(MEASURE) == "1")


if os.environ.get(VARIABLE):
    watch(os.environ[VARIABLE])
