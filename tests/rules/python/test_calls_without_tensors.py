"""Calls into code that knows no tensors, in which the graph breaks: they run for real as a whole."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
BAR = """
import time

class Bar:
    def __init__(self, out):
        self.out, self.count, self.text, self.start = out, 0, "", time.time()

    def set_text(self, text, work=None):
        self.text = text
        self.update()
        if work is not None:
            return work()

    def update(self):
        self.count += 1
        if self.count % 2 == 0 and time.time() >= self.start:
            self.show()
        self.last = time.time()

    def show(self):
        self.out.write(f"{self.count}: {self.text};")
        self.out.flush()
"""


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that does not know torch, with a progress bar in it."""
    module = types.ModuleType("bars_without_tensors")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(BAR, vars(module))
    return module


def trained(function: Callable[..., Any], bar: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    found = [function(model, torch.full((2, 3), float(step)), step, bar).detach() for step in range(12)]
    return found, [item.grad for item in model.parameters()], bar.count, bar.text, bar.out.getvalue()


def plain(model: Any, x: torch.Tensor, step: int, bar: Any) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    bar.set_text(f"step {step}")
    return loss * 2


def with_a_loss(model: Any, x: torch.Tensor, step: int, bar: Any) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    bar.set_text("step %d loss %.3f" % (step, loss.item()))
    return loss * 2


@pytest.mark.parametrize("program", [plain, with_a_loss])
def test_the_parts_of_a_call_are_not_captured(program: Callable[..., Any], bars: Any) -> None:
    compiled = dovetail.compile(program, backend="aten")
    same(trained(program, bars.Bar(io.StringIO())), trained(compiled, bars.Bar(io.StringIO())))
    assert captures(compiled) <= 8


def test_a_function_that_works_with_tensors_is_handed_on(bars: Any) -> None:
    def program(model: Any, x: torch.Tensor, step: int, bar: Any) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return bar.set_text("working", lambda: loss * 2)

    compiled = dovetail.compile(program, backend="aten")
    same(trained(program, bars.Bar(io.StringIO())), trained(compiled, bars.Bar(io.StringIO())))
