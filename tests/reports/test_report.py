"""``dovetail.report``: the page is whole and safe, and says what was compiled, why, and from which line."""

from __future__ import annotations

import json
import os
import runpy
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.face.dispatcher import SURROUNDINGS
from dovetail.reports import records
from dovetail.reports.measured import _machine
from dovetail.reports.page import render
from dovetail.reports.running import Watcher, watch
from tests import layout
from tests.reports.pages import check_page, find_browser, in_browser


def inner(x: torch.Tensor) -> torch.Tensor:
    print(end="</script><b>")  # the break, one frame further in
    return x.cos()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.scale = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        return inner(y) * self.scale


@pytest.fixture(scope="module")
def compiled() -> Any:
    net = Net()
    compiled = dovetail.compile(net, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scale in (3, 4):
            net.scale = scale
            compiled(torch.ones(2, 4)).sum().backward()
    return compiled


@pytest.fixture(scope="module")
def data(compiled: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = dovetail.report(compiled, tmp_path_factory.mktemp("report") / "report.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["functions"][0]
    return found


def text_of(where: dict[str, Any]) -> str:
    return str(where["text"])


def test_the_page_is_whole_and_holds_the_same_as_the_json(compiled: Any, data: dict[str, Any], tmp_path: Path) -> None:
    page = check_page(dovetail.report(compiled, tmp_path / "page.html").read_text(encoding="utf-8"))
    shown = page.data()["functions"][0]
    assert shown["breaks"] == data["breaks"] and shown["parts"] == data["parts"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_graph_break_has_all_frames_and_what_to_do(data: dict[str, Any]) -> None:
    (row,) = data["breaks"]
    assert row["reason"] == "print writes to the terminal" and row["advice"]
    assert [text_of(item) for item in row["stack"]][-2:] == [
        "return inner(y) * self.scale",
        'print(end="</script><b>")  # the break, one frame further in',
    ]


def test_a_recompile_is_a_sentence(data: dict[str, Any]) -> None:
    assert any("scale` was 3, is 4; needed at" in row["reason"] for row in data["recompiles"])


def test_parts_entries_and_guards_with_their_lines(data: dict[str, Any]) -> None:
    start, *after = data["parts"]
    assert start["label"] == "from the start" and after and all("from line" in part["label"] for part in after)
    (entry,) = start["entries"]
    assert entry["state"] == "up to a graph break"
    lines = {text_of(guard["where"]) for guard in [*entry["guards"], *entry["inputs"]] if guard["where"]}
    assert "y = self.first(x).relu()" in lines
    assert entry["saved"] and sum(row["bytes"] for row in entry["saved"]) == entry["saved_bytes"]


def test_forward_and_backward_meet_at_a_line_that_is_shown(data: dict[str, Any]) -> None:
    entry = data["parts"][0]["entries"][0]
    both = {row[3] for row in entry["forward"]} & {row[3] for row in entry["backward"]} - {-1}
    shown = {(file["file"], number): text for file in entry["source"] for number, text in file["rows"]}
    assert any("self.first(x).relu()" in shown[tuple(entry["lines"][index])] for index in both)


def test_an_entry_that_runs_eagerly_says_why(tmp_path: Path) -> None:
    def refused(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    compiled = dovetail.compile(refused, backend="aten")
    with pytest.warns(UserWarning, match=r"graph break|runs eagerly"):
        compiled(torch.ones(2))
    text = dovetail.report(compiled, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "a branch depends on the values of a tensor" in " ".join(check_page(text).texts["td"])


def test_names_and_code_are_escaped(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"torch": torch}
    source = 'def hostile(x, tag="</script><script>alert(1)</script>"):\n    return x.sin() if "<img src=x>" else x\n'
    exec(compile(source, "<img src=x onerror=alert(1)>.py", "exec"), namespace)
    namespace["hostile"].__qualname__ = "<img src=x onerror=alert(2)>"
    compiled = dovetail.compile(namespace["hostile"], backend="aten")
    compiled(torch.ones(2))
    page = check_page(dovetail.report(compiled, tmp_path / "page.html").read_text(encoding="utf-8"))
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert len([tag for tag, _ in page.elements if tag == "script"]) == 2
    assert "<img src=x onerror=alert(2)>" in page.texts["h2"]


def test_an_object_whose_text_cannot_be_had_is_named(tmp_path: Path) -> None:
    class Rude:
        def __str__(self) -> str:
            raise ValueError("no")

        __repr__ = __str__

    assert "Rude, whose text cannot be had: ValueError" in records.short(Rude())
    assert records.short("x" * 5000).endswith("… (5,000 characters)")


def test_what_was_measured_by_module_line_and_operator(compiled: Any, data: dict[str, Any], tmp_path: Path) -> None:
    assert "measured" not in data["parts"][0]["entries"][0]
    _machine.cache_clear()
    state = torch.get_rng_state()
    path = dovetail.report(compiled, tmp_path / "report.json", measure=True)
    assert torch.equal(state, torch.get_rng_state())
    entry = json.loads(path.read_text(encoding="utf-8"))["functions"][0]["parts"][0]["entries"][0]
    measured = entry["measured"]
    rows = [*entry["forward"], *entry["backward"]]
    total = sum(row[5] for row in rows)
    assert total > 0 and measured["forward"] > 0 and measured["backward"] > 0 and measured["peak_memory"] > 0
    for kind in ("modules", "lines", "operators"):
        assert sum(row[1] + row[2] for row in measured[kind]) == pytest.approx(total)
        assert sum(row[5] for row in measured[kind]) == len(rows)
        assert [row[1] + row[2] for row in measured[kind]] == sorted(
            (row[1] + row[2] for row in measured[kind]), reverse=True
        )
    first = next(row for row in measured["modules"] if row[0] == "first")
    assert first[1] > 0 and first[2] > 0 and first[3] == 2 * 2 * (2 * 4 * 8)  # forward, and the gradient of the weight
    shown = {(file["file"], number): text for file in entry["source"] for number, text in file["rows"]}
    line = next(row for row in measured["lines"] if "self.first(x)" in shown[tuple(entry["lines"][row[0]])])
    assert line[1] > 0 and line[2] > 0
    assert measured["machine"]["flops"] > 1e8 and measured["machine"]["bytes"] > 1e8


def test_memory_over_a_step_has_as_many_points_as_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.reports.graphs_as_data._MOST_POINTS", 3)
    compiled = dovetail.compile(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Tanh()), backend="aten"
    )
    compiled(torch.ones(2, 4)).sum().backward()
    path = dovetail.report(compiled, tmp_path / "report.json")
    memory = json.loads(path.read_text(encoding="utf-8"))["functions"][0]["parts"][0]["entries"][0]["memory"]
    assert len(memory["points"]) <= 3 < memory["operators"]
    assert max(row[1] for row in memory["points"]) == memory["peak"] == compiled.cost().peak_memory
    assert memory["at"]["name"] and memory["at"]["where"]["line"]


def test_an_entry_with_no_operators_and_an_eager_backend_are_measured_too(tmp_path: Path) -> None:
    same = dovetail.compile(lambda x: x, backend="aten")
    eager = dovetail.compile(lambda x: x.sin(), backend="eager")
    for function in (same, eager):
        function(torch.ones(2))
    page = dovetail.report([same, eager], tmp_path / "page.html", measure=True).read_text(encoding="utf-8")
    entries = [item["parts"][0]["entries"][0] for item in check_page(page).data()["functions"]]
    assert entries[0]["measured"]["machine"] is None and entries[1]["measured"]["operators"][0][0] == "sin"


def test_sizes_that_the_data_decides_are_shown_and_guard_nothing(tmp_path: Path) -> None:
    compiled = dovetail.compile(lambda x: (x[x > 0.5] * 2).sum(), backend="aten")
    for _ in range(2):
        compiled(torch.tensor([0.0, 1.0, 2.0], requires_grad=True)).backward()
    path = dovetail.report(compiled, tmp_path / "report.json", measure=True)
    entries = [
        entry
        for part in json.loads(path.read_text(encoding="utf-8"))["functions"][0]["parts"]
        for entry in part["entries"]
    ]
    values = [row[1] for entry in entries for row in entry.get("forward", ())]
    assert any("[u" in value for value in values), values


def test_several_functions_and_one_that_was_never_called(compiled: Any, tmp_path: Path) -> None:
    fresh = dovetail.compile(inner, backend="aten")
    path = dovetail.report([compiled, fresh], tmp_path / "page.html")
    names = [item["name"] for item in check_page(path.read_text(encoding="utf-8")).data()["functions"]]
    assert names == ["Net", "inner"]


def test_what_was_not_compiled_and_where_nothing_can_be_written(compiled: Any, tmp_path: Path) -> None:
    with pytest.raises(dovetail.errors.NotCallableError):
        dovetail.report(torch.sin, tmp_path / "page.html")
    with pytest.raises(OSError):
        dovetail.report(compiled, tmp_path / "no such folder" / "page.html")


def test_a_full_report_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records, "MOST_ENTRIES", 1)
    monkeypatch.setattr(records, "MOST_GUARDS", 2)
    monkeypatch.setattr(records, "Room", lambda seconds: records_room(nodes=1))
    compiled = dovetail.compile(lambda x, n: x * n, backend="aten", dynamic=False)
    for n in (1.5, 2.5):
        compiled(torch.ones(2), n)
    page = check_page(dovetail.report(compiled, tmp_path / "page.html").read_text(encoding="utf-8"))
    (function,) = page.data()["functions"]
    (entry,) = function["parts"][0]["entries"]
    assert "the report is full" in entry["graphs_left_out"] and "forward" not in entry
    assert len(entry["guards"]) <= 2


def records_room(nodes: int) -> Any:
    from dovetail.reports.graphs_as_data import Room

    return Room(nodes=nodes)


# --- of a whole program -----------------------------------------------------------------------------------------------


@pytest.fixture()
def watched(tmp_path: Path) -> Any:
    watcher = Watcher(lambda: [tmp_path / "all.html", tmp_path / "all.json"])
    yield watcher
    SURROUNDINGS.remove(watcher.around)
    watcher._is_on = False
    if watcher._timer is not None:
        watcher._timer.cancel()


def test_a_function_that_is_gone_is_in_the_report(watched: Watcher, tmp_path: Path) -> None:
    def passing() -> None:
        net = Net()
        dovetail.compile(net, backend="aten")(torch.ones(2, 4))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        passing()
    watched.ended_with(ValueError("<lost>"))
    watched.write()
    data = check_page((tmp_path / "all.html").read_text(encoding="utf-8")).data()
    (function,) = data["functions"]
    assert function["name"] == "Net" and function["parts"][0]["entries"][0]["forward"] and len(function["parts"]) > 1
    assert data["ended"] == "ended with ValueError: <lost>"


def test_a_program_is_measured_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_REPORT_MEASURE", "1")
    watcher = watch(str(tmp_path))
    assert watcher is not None
    try:
        dovetail.compile(torch.nn.Linear(4, 4), backend="aten")(torch.ones(2, 4)).sum().backward()
        watcher.write()
    finally:
        SURROUNDINGS.remove(watcher.around)
        watcher._is_on = False
    (path,) = tmp_path.glob("*.json")
    (entry,) = json.loads(path.read_text(encoding="utf-8"))["functions"][0]["parts"][0]["entries"]
    assert entry["measured"]["forward"] > 0


def test_a_report_that_fails_warns_once_and_the_program_goes_on(watched: Watcher, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    watched._targets = lambda: [tmp_path / "file" / "all.html"]
    double = dovetail.compile(lambda x: x * 2, backend="aten")
    assert double(torch.ones(1)).item() == 2
    with pytest.warns(RuntimeWarning, match="no report is written any more"):
        watched.write()
    watched.write()
    assert double(torch.ones(3)).sum().item() == 6


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = list(SURROUNDINGS)
    with pytest.warns(RuntimeWarning, match="no report is written, because the folder cannot be made"):
        assert watch(str(tmp_path / "file" / "reports")) is None
    assert before == SURROUNDINGS


def test_where_no_process_can_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows there is no ``os.register_at_fork``."""
    monkeypatch.delattr(os, "register_at_fork", raising=False)
    watcher = watch(str(tmp_path))
    assert watcher is not None
    SURROUNDINGS.remove(watcher.around)
    watcher._is_on = False


def test_the_number_of_functions_is_bounded(watched: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.reports.running.MOST_FUNCTIONS", 1)
    for _ in range(3):
        dovetail.compile(lambda x: x + 1, backend="aten")(torch.ones(1))
    watched.write()
    data = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert len(data["functions"]) == 1 and data["functions_left_out"] >= 2


_PROGRAM = """
import multiprocessing, sys, torch, dovetail

def child():
    dovetail.compile(lambda x: x + 1, backend="aten")(torch.ones(2))

def main():
    print(sys.argv[1:])
    net = torch.nn.Linear(2, 2)
    dovetail.compile(net, backend="aten")(torch.ones(1, 2)).sum().backward()

if __name__ == "__main__":
    main()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    raise RuntimeError("a crash")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["variable", "command"])
def test_a_script_that_forks_and_crashes_leaves_reports(way: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(layout.ROOT)}
    start = [sys.executable]
    if way == "variable":
        environment["DOVETAIL_REPORT"] = str(tmp_path / "out")
    else:
        start += ["-m", "dovetail.cli", "report", "-o", str(tmp_path / "out" / "train.html")]
    done = subprocess.run(
        [*start, str(script), "--lr", "1"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1 and done.stdout == "['--lr', '1']\n"
    assert "RuntimeError: a crash" in done.stderr and "runpy" not in done.stderr
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert len(found) == 2 and len(list((tmp_path / "out").iterdir())) == 4
    ended = {data["ended"]: [item["name"] for item in data["functions"]] for data in found.values()}
    assert ended == {"ended with RuntimeError: a crash": ["Linear"], "": ["child.<locals>.<lambda>"]}


_WINDOWS = """import torch, dovetail

def step(x):
    print(end="")
    return x.sin()

dovetail.compile(step, backend="aten")(torch.ones(3, requires_grad=True)).sum().backward()
"""


def test_a_script_with_line_ends_of_windows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(_WINDOWS.replace("\n", "\r\n").encode())
    page = tmp_path / "train.html"
    watcher = Watcher(lambda: [page, page.with_suffix(".json")])
    try:
        with pytest.warns(dovetail.errors.GraphBreakWarning, match=r"train.py:4 `print\(end=\"\"\)`\n  what"):
            runpy.run_path(str(script))
        watcher.write()
    finally:
        SURROUNDINGS.remove(watcher.around)
        watcher._is_on = False
    data = check_page(page.read_text(encoding="utf-8")).data()
    (function,) = data["functions"]
    assert function["breaks"][0]["where"]["line"] == 4
    entries = [entry for part in function["parts"] for entry in part["entries"]]
    rows = [row for entry in entries for file in entry["source"] for row in file["rows"]]
    assert [5, "    return x.sin()"] in rows, rows
    assert "\\r" not in json.dumps(data)


@pytest.mark.slow
def test_a_command_that_cannot_write_or_finds_no_script_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(layout.ROOT)}
    command = [sys.executable, "-m", "dovetail.cli", "report"]
    for arguments, text in (
        (["-o", str(tmp_path / "file" / "a.html"), __file__], "the folder cannot be made"),
        ([str(tmp_path / "train.py")], "there is no file"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 2 and text in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_flags_after_the_script_are_the_scripts_and_that_is_said(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    environment = {**os.environ, "PYTHONPATH": str(layout.ROOT)}
    for flags, said in ((["-o", "page.html"], True), (["--epochs", "3"], False)):
        command = [sys.executable, "-m", "dovetail.cli", "report", str(script), *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True, timeout=300
        )
        assert done.stdout.strip() == str(flags) and ("before it, it is ours" in done.stderr) == said


# --- in a browser -----------------------------------------------------------------------------------------------------

_LOOK = """
const rest = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
for (let depth = 0; depth < 2; depth += 1) {
  for (const details of document.querySelectorAll("details")) details.open = true;
  await rest(50);
}
const [source, forward, backward] = document.querySelectorAll(".list");
const row = forward.querySelector(".row.has");
row.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
const lit = [source, forward, backward].map((list) => list.querySelectorAll(".row.lit").length);
row.dispatchEvent(new MouseEvent("click", { bubbles: true }));
await rest(50);
const pinned = [source, forward, backward].map((list) => list.querySelectorAll(".row.pinned").length);
backward.scrollTop = 1e7;
backward.dispatchEvent(new Event("scroll"));  // a page without a screen may draw no frame
const last = [...backward.querySelectorAll(".row")].map((item) => Number(item.dataset.index));
return { lit, pinned, last: Math.max(...last), elements: document.querySelectorAll("*").length,
         guards: document.querySelectorAll(".slot td").length,
         pictures: [...document.querySelectorAll("svg")].map((svg) => svg.getAttribute("aria-label")),
         points: document.querySelectorAll(".point").length, bars: document.querySelectorAll(".row.timed, td.timed").length };
"""


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 250])
def test_a_browser_marks_what_belongs_to_a_line(layers: int, tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("there is no Chromium or Chrome here (DOVETAIL_BROWSER names one)")
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU())]
    compiled = dovetail.compile(torch.nn.Sequential(*parts), backend="aten")
    compiled(torch.ones(2, 4)).sum().backward()
    path = dovetail.report(compiled, tmp_path / "page.html", measure=True)
    entry = check_page(path.read_text(encoding="utf-8")).data()["functions"][0]["parts"][0]["entries"][0]
    found = in_browser(browser, path, _LOOK)
    assert all(found["lit"]) and all(found["pinned"]) and found["guards"] > 0, found
    assert found["last"] >= len(entry["backward"])  # there are rows for modules too
    assert found["pictures"] == ["roofline", "memory over a step"] and found["points"] > 5 and found["bars"] > 20, found
    # Of some thousand operators only those in view are in the page.
    assert found["elements"] < 6000


@pytest.mark.slow
def test_the_pictures_of_the_docs_are_made_and_small(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("there is no Chromium or Chrome here (DOVETAIL_BROWSER names one)")
    script = layout.ROOT / "benchmarks" / "report_pictures.py"
    environment = {**os.environ, "PYTHONPATH": str(layout.ROOT), "DOVETAIL_BROWSER": browser}
    subprocess.run(
        [sys.executable, str(script), str(tmp_path), "report-breaks", "report-measured"], check=True, env=environment
    )
    sizes = {path.stem: png_size(path) for path in tmp_path.glob("*.png")}
    assert sizes == {"report-breaks": (1280, 860), "report-measured": (1280, 1400)}
    kept = list((layout.ROOT / "docs" / "images").glob("report*.png"))
    assert len(kept) == 4 and all(path.stat().st_size < 300_000 for path in kept)


def png_size(path: Path) -> tuple[int, int]:
    width, height = struct.unpack(">4xII", path.read_bytes()[12:24])
    return width, height


_BARS = """
return [...document.querySelectorAll(".times i")].map((bar) => [bar.style.width, bar.style.top, bar.title]);
"""


@pytest.mark.slow
def test_pauses_between_stages_are_cut_short(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("there is no Chromium or Chrome here (DOVETAIL_BROWSER names one)")
    row = {"name": "compile", "seconds": 1.0, "depth": 0, "details": "<b>"}
    times = [row | {"start": 0.0, "thread": 0}, row | {"start": 86_400.0, "thread": 1, "seconds": None}]
    times.insert(1, row | {"start": 86_398.0, "thread": 1})
    path = tmp_path / "page.html"
    shown = {
        "options": {},
        "parts": [],
        "breaks": [],
        "recompiles": [],
        "seconds": {},
        "timeline": times,
        "end": 86_400.0,
    }
    path.write_text(render({"functions": [shown]}), encoding="utf-8")
    bars = in_browser(browser, path, _BARS)
    assert [float(width.removesuffix("%") or 0) > 40 for width, _, _ in bars] == [True, True, False]
    assert [top for _, top, _ in bars] == ["1px", "19px", "19px"]
    assert [title for _, _, title in bars] == ["compile 1.00 s <b>", "compile 1.00 s <b>", "compile <b>"]
