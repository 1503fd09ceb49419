"""What Dovetail decides, as lines of ``logging``; ``explain`` before the first call."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import OptionError
from dovetail.switches.logs import TOPICS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")


@pytest.fixture(autouse=True)
def _nothing_is_logged_later() -> Iterator[None]:
    yield
    dovetail.set_logs()


def printing(x: Tensor) -> Tensor:
    x = x + 1
    print(end="")
    return x * 2


def run(*sizes: tuple[int, ...]) -> None:
    compiled = dovetail.compile(printing, backend="aten")
    for size in sizes:
        compiled(torch.ones(size))


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.name.removeprefix("dovetail."), record.getMessage()) for record in caplog.records]


def test_by_levels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dovetail"):
        run((2,), (2, 2))
    names = {name for name, _ in lines(caplog)}
    assert names == {"breaks", "recompiles"}
    texts = [text for _, text in lines(caplog)]
    place = f'{Path(__file__)}:{printing.__code__.co_firstlineno + 2} `print(end="")`'
    assert texts[0] == f"printing: graph break: print writes to the terminal\n  at {place}"
    assert any(text.startswith("printing: recompile: `x.dim()` was 1, is 2; needed at") for text in texts)


def test_silent_without_being_asked(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    run((2,), (2, 2))
    assert lines(caplog) == []
    assert capfd.readouterr().err == ""


def test_by_topics(caplog: pytest.LogCaptureFixture) -> None:
    dovetail.set_logs("recompiles", "guards", "graphs", "stages")
    run((2,), (2, 2))
    found = lines(caplog)
    assert {name for name, _ in found} == {"recompiles", "guards", "graphs", "stages"}
    assert any("add.Tensor(" in text for name, text in found if name == "graphs")
    assert any("`x`" in text or "L['x']" in text for name, text in found if name == "guards")
    assert any(text.startswith("printing: capture ") for name, text in found if name == "stages")
    caplog.clear()
    dovetail.set_logs()
    run((2,))
    assert not caplog.records
    with pytest.raises(OptionError, match=r"no topic 'brakes'(.|\n)*did you mean 'breaks'"):
        dovetail.set_logs("brakes")


def test_torchs_own_switch(caplog: pytest.LogCaptureFixture) -> None:
    torch._logging.set_logs(graph_breaks=True)
    try:
        run((2,), (2, 2))
        assert {name for name, _ in lines(caplog) if name in TOPICS} == {"breaks"}
    finally:
        torch._logging.set_logs()


def test_the_rank_is_in_each_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.switches import logs

    ranks = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3)
    monkeypatch.setattr(logs, "torch", types.SimpleNamespace(distributed=ranks))
    with caplog.at_level(logging.INFO, "dovetail"):
        run((2,))
    texts = [text for _, text in lines(caplog)]
    assert texts and texts[0].startswith("[rank3] printing: graph break")
    assert all(line.startswith("[rank3] ") for text in texts for line in text.splitlines())
    assert any("\n[rank3]   at " in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), (("DOVETAIL_LOG", "breaks,recompiles"), ("TORCH_LOGS", "graph_breaks,recompiles"))
)
def test_the_environment(name: str, value: str) -> None:
    program = "from tests.switches.test_logs import run; run((2,), (2, 2))"
    environment = {**os.environ, name: value, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert "printing: graph break: print writes to the terminal\n  at " in done.stderr
    assert "printing: recompile: `x.dim()` was 1, is 2" in done.stderr


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        return self.linear(x) + torch.rand(())


def test_explain_before_the_first_call_changes_nothing() -> None:
    model, x = Counting(), torch.ones(1, 2)
    compiled = dovetail.compile(model, backend="aten")
    state = torch.get_rng_state()
    found = dovetail.explain(compiled)(x)
    assert str(found).startswith("0 compiled entries\nexpected at the first call: one graph, <joint graph of Counting")
    assert torch.equal(state, torch.get_rng_state())
    assert model.calls.item() == 0 and model.seen == [] and not compiled.compiled_call.entries
    assert "expected at the first call" in found._repr_html_()
    compiled(x)
    assert dovetail.explain(compiled)(x).expected == ""


def test_explain_names_the_first_break_and_the_programs_error() -> None:
    compiled = dovetail.compile(printing, backend="aten")
    assert dovetail.explain(compiled)(torch.ones(2)).expected.startswith(
        "a graph break: print writes to the terminal\n  at "
    )
    wrong: Any = dovetail.compile(torch.nn.Linear(3, 2), backend="aten")
    assert dovetail.explain(wrong)(torch.ones(1, 2)).expected.startswith("the program raises RuntimeError")
