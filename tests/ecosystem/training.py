"""The same training twice, eagerly and compiled: what both leave must be equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dovetail
from dovetail.reports.explanation import compiled_function
from tests.differential import same

Wrap = Callable[[Any], Any]


def eager(function: Any) -> Any:
    return function


def compile_aten(function: Any) -> Any:
    return dovetail.compile(function, backend="aten")


def compare(run: Callable[[Wrap], tuple[Any, Any]], captures: int | None = None) -> None:
    """``run(wrap)`` returns what is compared, and what ``wrap`` has made; it may be captured ``captures`` times."""
    torch.manual_seed(0)
    expected, _ = run(eager)
    torch.manual_seed(0)
    found, compiled = run(compile_aten)
    same(expected, found)
    events = dovetail.events_of(compiled)
    assert events.count("capture") and compiled_function(compiled).entries
    assert captures is None or events.count("capture") <= captures


def train(model: torch.nn.Module, call: Any, loss: Callable[[Any, int], torch.Tensor], steps: int = 3) -> list[Any]:
    """A loop with a schedule and clipping; losses and the state that it leaves."""
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for index in range(steps):
        found = loss(call, index)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(found.detach())
    return [losses, dict(model.state_dict())]
