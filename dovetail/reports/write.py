"""``dovetail.report``: everything compiled, as one page or as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dovetail.face.attempts import capturing
from dovetail.frontend.code.frame import Break
from dovetail.reports.event_logs import as_trace
from dovetail.reports.explanation import compiled_function
from dovetail.reports.page import render
from dovetail.reports.records import FunctionRecord, short
from dovetail.versions import __version__

#: How long a function's entries are measured; those that are left then are not.
MEASURING = 60.0


def report(compiled: Any, path: str | os.PathLike[str], *, measure: bool = False) -> Path:
    """Write a report on a compiled function or module, or on several in a list, to a file.

    A path that ends with ``.trace.json`` gets the stages as a trace that Perfetto opens, one that ends with ``.json`` the report as
    JSON, any other one a page that needs no other file and no network. Returns
    the path. Raises OSError where it cannot be written. ``measure``: time each operator, and the whole call, on made-up values.

    >>> import tempfile, torch, dovetail
    >>> double = dovetail.compile(lambda x: x * 2, backend="aten")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(dovetail.report(double, f"{folder}/report.html").name)
    report.html
    """
    if capturing.active:
        raise Break("dovetail.report is called inside of a compiled function", "call it outside")
    seconds = MEASURING if measure else 0.0
    several = compiled if isinstance(compiled, (list, tuple)) else [compiled]
    return write(Path(path), [FunctionRecord.of(compiled_function(item), seconds) for item in several])


def write(path: Path, records: Iterable[FunctionRecord], left_out: int = 0, ended: str = "") -> Path:
    """Write a report on these functions; a file that was there is replaced as a whole."""
    records = list(records)
    shown = " ".join(os.path.basename(item) if not index else item for index, item in enumerate(sys.argv))
    data = {
        "command": short(shown, 300) or "Python",
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "process": os.getpid(),
        "rank": os.environ.get("RANK", ""),
        "ended": ended,
        "versions": {"dovetail": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "functions": [record.as_data() for record in records],
        "functions_left_out": left_out,
    }
    text = json.dumps(data, ensure_ascii=False) if path.suffix == ".json" else render(data)
    if path.name.endswith(".trace.json"):
        text = as_trace([record.log for record in records])
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # A lone surrogate, in the name of a file say, is no text that can be written.
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return path
