"""Explanations, event logs and continuations can be read in a terminal and in a notebook, and stay short."""

from __future__ import annotations

import warnings

import torch

import dovetail
from dovetail.events import EventLog
from dovetail.reports.explanation import Explanation, compiled_function


def test_an_explanation_prints_the_latest_events_only() -> None:
    explanation = Explanation(("hit", "miss: <b>"), tuple(f"event {number}" for number in range(4096)), ("f: 1 entry",))
    lines = str(explanation).splitlines()
    assert lines[:5] == [
        "2 compiled entries",
        "  entry 0: hit",
        "  entry 1: miss: <b>",
        "1 graph break",
        "  f: 1 entry",
    ]
    assert lines[5] == "4096 events, the last 50 of them"
    assert lines[-1] == "  event 4095" and len(lines) == 56
    page = explanation._repr_html_()
    assert "miss: &lt;b&gt;" in page and "2 compiled entries" in page and "event 0<" in page


def test_an_event_log_is_bounded() -> None:
    log = EventLog(limit=100)
    for number in range(10_000):
        log.note("recompile", reason=f"<{number}>")
    assert len(log.events) == 100 and log.dropped == 9_900 and log.count("recompile") == 10_000
    assert len(repr(log).splitlines()) == 52
    assert log._repr_html_().count("<tr>") == 101 and "&lt;9999&gt;" in log._repr_html_()


def test_a_compiled_function_with_a_break_names_its_parts() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        print(end="")
        return y.relu()

    compiled = dovetail.compile(noisy, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(torch.ones(2))
    (continuation,) = compiled_function(compiled).continuations()
    assert "noisy (going on at line" in repr(continuation) and "1 compiled entry" in repr(continuation)
    text = str(dovetail.explain(compiled)(torch.ones(2)))
    assert "1 graph break\n" in text and "1 compiled entry after it" in text
