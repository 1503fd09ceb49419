"""What takes long is said while it happens, and nothing where nobody listens."""

from __future__ import annotations

import io
import logging
import sys
import time

import pytest

from dovetail.tiers import progress
from dovetail.tiers.progress import Progress, stage


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.02)


def slow() -> None:
    with stage("compiling a graph"):
        time.sleep(0.1)


def test_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(progress.SWITCH, "1")
    slow()
    begin, end = capsys.readouterr().err.splitlines()
    assert begin.startswith("dovetail: compiling a graph (")
    assert end.startswith("dovetail: compiling a graph: done after 0.")


def test_what_is_quick_is_not_spoken_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(progress.SWITCH, "1")
    monkeypatch.setattr(progress, "SECONDS", 5.0)
    with stage("compiling a graph"):
        time.sleep(0.01)
    assert capsys.readouterr() == ("", "")


def test_a_failure_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(progress.SWITCH, "1")
    with pytest.raises(ZeroDivisionError), stage("compiling a graph"):
        time.sleep(0.1)
        raise ZeroDivisionError
    assert "compiling a graph: failed after" in capsys.readouterr().err


@pytest.mark.parametrize("switch", ["0", ""])
def test_quiet_where_nobody_listens(
    switch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(progress.SWITCH, switch)
    slow()
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


def test_the_logger_hears_it_outside_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(progress.SWITCH, raising=False)
    with caplog.at_level(logging.INFO, logger="dovetail"):
        slow()
    assert [record.name for record in caplog.records] == ["dovetail", "dovetail"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_dumb_terminal_gets_nothing_that_it_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(progress.SWITCH, raising=False)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    slow()
    assert stream.getvalue() == ""


def test_a_terminal_gets_one_line_that_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(progress.SWITCH, raising=False)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    slow()
    written = stream.getvalue()
    assert written.count("\r\x1b[K") == 2
    assert written.count("\n") == 1
    assert written.endswith("s\n")


def test_a_closed_stream_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.SWITCH, "1")
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    slow()


def test_only_what_is_new_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(progress.SWITCH, "1")
    far = iter(["graph 1 of 2", "graph 1 of 2", "graph 2 of 2"])
    item = Progress("compiling", lambda: next(far))
    for _ in range(3):
        time.sleep(0.03)
        item.look()
    item.end()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in lines[:-1]] == [
        "dovetail: compiling, graph 1 of 2",
        "dovetail: compiling, graph 2 of 2",
    ]
