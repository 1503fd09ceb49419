"""Events as a trace: a track for each function and thread, by name; compilations by number; the user's frames of a graph break."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.events import EventLog
from dovetail.reports.event_logs import trace_rows
from dovetail.reports.explanation import compiled_function


def inner(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x.cos()


def outer(x: torch.Tensor) -> torch.Tensor:
    return inner(x.sin()) + 1


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


def test_two_functions_have_a_track_each_and_a_break_has_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    one, other = dovetail.compile(outer, backend="aten"), dovetail.compile(torch.nn.Linear(2, 2), backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one(torch.ones(2))
    other(torch.ones(1, 2))
    rows = rows_of(dovetail.report([one, other], tmp_path / "all.trace.json"))
    names = {row["tid"]: row["args"]["name"] for row in rows if row["ph"] == "M" and row["name"] == "thread_name"}
    assert list(names.values()) == ["outer (MainThread)", "Linear (MainThread)"]
    assert rows[0]["args"]["name"].endswith("rank 3")
    for row in rows:
        if row["ph"] != "M":
            assert names[row["tid"]].startswith(row["args"]["function"] + " ")
    (stop,) = [row for row in rows if row["name"] == "graph break"]
    frames = stop["args"]["stack"].splitlines()
    assert "return inner(x.sin()) + 1" in frames[-2] and 'print(end="")' in frames[-1]
    numbers = [row["args"]["compilation"] for row in rows if row["name"] == "capture"]
    assert numbers == [0, 1, 0]


def test_a_thread_has_its_name_and_dropped_compilations_count() -> None:
    log = EventLog(limit=3, owner="step")

    def compile_once() -> None:
        with log.span("compile"), log.span("capture"):
            log.note("graph break", reason="print")

    for _ in range(2):
        compile_once()
    thread = threading.Thread(target=compile_once, name="second")
    thread.start()
    head, *rows = trace_rows([log])
    thread.join()
    assert head["args"]["name"].startswith("step (") and {row["args"]["compilation"] for row in rows} == {2}


def test_a_profiler_sees_function_and_number_of_the_compilation() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin()

    compiled = dovetail.compile(step, backend="aten", dynamic=False)
    inputs = [torch.ones(size, requires_grad=True) for size in (2, 3)]
    for x in inputs:
        compiled(x)
    with torch.profiler.profile() as profile:
        for x in inputs:
            compiled(x).sum().backward()
        with torch.no_grad():
            compiled(inputs[0])
    names = [event.name for event in profile.events() if "step [" in event.name]
    owner = compiled_function(compiled).events.owner
    assert names == [
        f"{owner} [{text}" for text in ("0] forward", "0] backward", "1] forward", "1] backward", "2] inference")
    ]
    assert all(map(torch.equal, (x.grad for x in inputs), (2 * (2 * x).cos() for x in inputs)))
