"""Events as a trace: a track for each function and thread, by name; compilations by number; the user's frames of a graph break."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.aot.steps import instead_of_steps
from dovetail.events import EventLog
from dovetail.reports.event_logs import trace_rows
from dovetail.reports.explanation import compiled_function
from dovetail.switches import labels
from tests import layout


def inner(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x.cos()


def outer(x: torch.Tensor) -> torch.Tensor:
    return inner(x.sin()) + 1


def own_layer() -> torch.nn.Module:
    """Of a class of its own: it takes the entries of no equal module."""

    class Own(torch.nn.Linear):
        pass

    return Own(2, 2)


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


def test_two_functions_have_a_track_each_and_a_break_has_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    one, other = dovetail.compile(outer, backend="aten"), dovetail.compile(own_layer(), backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one(torch.ones(2))
    other(torch.ones(1, 2))
    rows = rows_of(dovetail.report([one, other], tmp_path / "all.trace.json"))
    names = {row["tid"]: row["args"]["name"] for row in rows if row["ph"] == "M" and row["name"] == "thread_name"}
    assert list(names.values()) == ["outer (MainThread)", "Own (MainThread)"]
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


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, Any], str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        metadata: Any = record.__dict__["metadata"]
        self.found.append((metadata, record.__dict__["payload"] or ""))


@pytest.fixture()
def traced() -> Iterator[_Records]:
    """What ``TORCH_TRACE`` would write."""
    handler, logger = _Records(), logging.getLogger("torch.__trace")
    logger.addHandler(handler)
    instead_of_steps(labels._traced)
    EventLog.listeners.append(labels._on_event)
    yield handler
    EventLog.listeners.remove(labels._on_event)
    instead_of_steps.remove(labels._traced)
    logger.removeHandler(handler)


def test_tlparse_finds_graphs_breaks_and_the_users_frames_by_function_and_compilation(traced: _Records) -> None:
    one, other = dovetail.compile(outer, backend="aten"), dovetail.compile(own_layer(), backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one(torch.ones(2, requires_grad=True))
    other(torch.ones(1, 2))
    ids = [(item["frame_id"], item["frame_compile_id"]) for item, _ in traced.found if "aot_joint_graph" in item]
    first = ids[0][0]
    assert ids == [(first, 0), (first, 1), (first + 1, 0)] and first >= 10_000
    texts = {name: text for item, text in traced.found for name in item if name.startswith("aot_")}
    assert "addmm.default(" in texts["aot_joint_graph"] and "def forward(" in texts["aot_forward_graph"]
    assert "def forward(" in texts["aot_backward_graph"]
    (stop,) = [item for item, _ in traced.found if item.get("artifact", {}).get("name") == "graph_break"]
    assert (stop["frame_id"], stop["frame_compile_id"]) == (first, 1)
    start = next(item for item, _ in traced.found if "dynamo_start" in item)
    names = [frame["name"] for frame in start["dynamo_start"]["stack"]]
    assert names[-2:] == [sys._getframe().f_code.co_name, "outer"]
    files = {item["str"][1]: item["str"][0] for item, _ in traced.found if "str" in item}
    assert not [name for name in files.values() if name.startswith(str(layout.PACKAGE))]


@pytest.mark.slow
def test_the_environment_asks_for_what_tlparse_reads(tmp_path: Path) -> None:
    program = "import torch, dovetail; dovetail.compile(torch.nn.Linear(2, 2), backend='aten')(torch.ones(1, 2))"
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "PYTHONPATH": str(layout.ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    (log,) = tmp_path.iterdir()
    text = log.read_text(encoding="utf-8")
    assert '"aot_joint_graph": {}, "frame_id": 10000, "frame_compile_id": 0' in text
