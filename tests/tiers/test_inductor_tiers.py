"""Inductor in tiers, with a real process in the background: what it has compiled is found in the cache on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.tiers import choice, contest, process, tuning
from tests.differential import compare_modules, same

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(choice.SWITCH, raising=False)
    with process.stopped_at_end():
        yield


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(16), nn.Linear(16, 3))


def train(model: nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    loss = model(torch.randn(8, 6)).square().mean()
    loss.backward()
    return torch.cat([loss.detach().reshape(1), torch.rand(1)])


def test_kernels_come_from_the_background() -> None:
    eager, model = make(), make()
    compiled = dovetail.compile(model, backend="inductor", fullgraph=True, check_swap=True)
    for step in range(3):
        same(train(eager, step), train(compiled, step))
    assert dovetail.wait(compiled, 300) is False  # the next call compares
    for step in range(3, 6):
        same(train(eager, step), train(compiled, step), exact=False)
        compare_modules(eager, model, "model", exact=False)
    log = dovetail.events_of(compiled)
    assert [log.count(name) for name in ("swap checked", "tier 1", "stays on tier 0", "compiled in this process")] == [
        1,
        1,
        0,
        0,
    ]


def test_a_whole_step_with_a_schedule_gets_its_kernels() -> None:
    models = make(), make()
    steps, owners = [], []
    for model in models:
        owners.append(torch.optim.AdamW(model.parameters()))

        def step(x: torch.Tensor, model: nn.Module = model, owner: torch.optim.Optimizer = owners[-1]) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            owner.step()
            owner.zero_grad()
            return loss.detach()

        steps.append(step)
    eager, compiled = steps[0], dovetail.compile(steps[1], backend="inductor", fullgraph=True)
    for number in range(6):
        for group in (*owners[0].param_groups, *owners[1].param_groups):
            group["lr"] = 0.01 / (1 + number)
        losses = []
        for call in (eager, compiled):
            torch.manual_seed(number)
            losses.append(call(torch.randn(8, 6)))
        same(*losses, exact=number < 3)
        compare_modules(*models, "model", exact=number < 3)
        assert number != 2 or dovetail.wait(compiled, 300)
    log = dovetail.events_of(compiled)
    assert [log.count(name) for name in ("tier 1", "waits for kernels", "compiled in this process")] == [1, 0, 0]


def test_sizes_that_change_get_their_kernels_in_the_background() -> None:
    eager, model = make(), make()
    compiled = dovetail.compile(model, backend="inductor", fullgraph=True)

    def one(module: nn.Module, size: int) -> torch.Tensor:
        torch.manual_seed(size)
        loss = module(torch.randn(size, 6)).square().mean()
        loss.backward()
        return torch.cat([loss.detach().reshape(1), torch.rand(1)])

    for size in (8, 5, 8, 5):
        same(one(eager, size), one(compiled, size))
    assert dovetail.wait(compiled, 300)
    for size in (7, 2, 5, 1025, 1, 9):
        same(one(eager, size), one(compiled, size), exact=False)
        compare_modules(eager, model, "model", exact=False)
    log = dovetail.events_of(compiled)
    assert [log.count(name) for name in ("waits for kernels", "compiled in this process", "stays on tier 0")] == [
        0,
        0,
        0,
    ]
    assert log.count("tier 1") >= 1


@pytest.mark.parametrize("is_step", [True, False])
def test_sizes_that_turn_out_to_be_the_same(is_step: bool) -> None:
    """The loss says that there are as many labels as examples: both sizes are one."""
    models = make(), make()

    def step(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), labels)
        if is_step:
            loss.backward()
        return loss.detach() if is_step else loss

    compiled: Any = dovetail.compile(step, backend="inductor", fullgraph=True)
    for size in (9, 6, 7, 5, 8):
        losses = []
        for model, call in zip(models, (step, compiled)):
            torch.manual_seed(size)
            losses.append(call(model, torch.randn(size, 6), torch.randint(0, 3, (size,))))
            if not is_step:
                losses[-1].backward()
        same(*losses, exact=False)
        compare_modules(*models, "model", exact=False)
        if size == 7:
            dovetail.wait(compiled, 300)
    log = dovetail.events_of(compiled)
    assert log.count("tier 1") and not log.count("stays on tier 0"), log


def test_a_killed_compiler_leaves_the_operators() -> None:
    model = make()
    compiled = dovetail.compile(model, backend="inductor")
    for step in range(2):
        train(compiled, step)
    worker = process.worker()
    deadline = time.monotonic() + 120
    while not list(worker.folder.glob("*.begun")) and time.monotonic() < deadline:
        time.sleep(0.01)
    worker.kill()
    with pytest.warns(UserWarning, match="goes on by ATen operators"):
        assert dovetail.wait(compiled, 60)
    eager = make()
    eager.load_state_dict(model.state_dict())
    same(train(eager, 5), train(compiled, 5))


def test_variants_of_the_kernels_compete(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setattr(contest, "LOOKS", (12,))
    monkeypatch.setattr(tuning, "SHORTEST", 0.0)
    every = tuning.VARIANTS["inductor"]
    monkeypatch.setitem(tuning.VARIANTS, "inductor", lambda graph: every(graph)[:2])
    for turn in range(2):
        eager, model = make(), make()
        compiled = dovetail.compile(model, backend="inductor", fullgraph=True, tune=True)
        log, step, deadline = dovetail.events_of(compiled), 0, time.monotonic() + 400
        while log.count("tuned") + log.count("tuned before") < 2 and time.monotonic() < deadline:
            same(train(eager, step), train(compiled, step), exact=False)
            step += 1
            time.sleep(0.01)  # the background has the lowest priority
            if step == 2:
                assert dovetail.wait(compiled, 300)
        compare_modules(eager, model, "model", exact=False)
        assert (log.count("tuned"), log.count("tuned before")) == ((0, 2) if turn else (2, 0))
        assert log.count("variant not tried") == 0
        assert bool(log.count("variant kept") + log.count("variant dropped")) is not bool(turn)
