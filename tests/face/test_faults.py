"""Faults of Dovetail's own, in every stage: with ``fullgraph=False`` eager takes the call, with one warning."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import EagerFallbackWarning, GraphBreakError

STAGES = (
    "dovetail.face.attempts:run_frontend",
    "dovetail.face.attempts:create_state",
    "dovetail.face.attempts:capture_joint",
    "dovetail.aot.capture_joint:finish_joint",
    "dovetail.aot.compile_joint:prepare",
    "dovetail.aot.compile_joint:partition",
    "dovetail.aot.compile_joint:lower_forward",
    "dovetail.aot.compile_joint:lower_backward",
    "dovetail.aot.compile_joint:bind",
    "dovetail.face.attempts:make_entry",
    "dovetail.face.attempts:Attempts._checked",
    "dovetail.face.attempts:Attempts.run",
    "dovetail.face.dispatcher:Dispatcher._learn",
    "dovetail.guards:GuardSet.freeze",
    "dovetail.guards.checker:Checker.explain",
    "dovetail.runtime.entry:generate",
)


def break_stage(monkeypatch: pytest.MonkeyPatch, stage: str, first: int) -> list[int]:
    """Raise in a function from its call number ``first`` on."""
    module, name = stage.split(":")
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    whole, calls = getattr(owner, last), [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] >= first:
            raise AssertionError("a fault")
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, last, broken)
    return calls


class Step:
    """Writes to everything that it can reach, and draws numbers."""

    def __init__(self) -> None:
        self.total, self.log = torch.zeros(3), []

    def __call__(self, x: Tensor) -> Tensor:
        self.log.append(len(self.log))
        y = torch.nn.functional.dropout(x.sin(), 0.5)
        self.total.add_(y.detach())
        return y * y * len(self.log)


def run(step: Any, state: Step) -> list[Any]:
    torch.manual_seed(0)
    out: list[Any] = []
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        step(x).sum().backward()
        out += [x.grad.tolist(), state.total.tolist(), list(state.log), torch.rand(1).item()]  # type: ignore[union-attr]
    return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_eager_takes_the_call(stage: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, state = Step(), Step()
    expected = run(eager, eager)
    compiled = dovetail.compile(state, backend="aten")
    calls = break_stage(monkeypatch, stage, first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run(compiled, state) == expected
    if calls[0] >= first:
        assert [item.category for item in caught] == [EagerFallbackWarning]


@pytest.mark.parametrize("stage", STAGES[::5])
def test_one_graph_is_refused_in_words(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_stage(monkeypatch, stage, 1)
    with pytest.raises(GraphBreakError, match="(?s)a fault.*what to do"):
        dovetail.compile(torch.sin, backend="aten", fullgraph=True)(torch.ones(3))
