"""Inductor in tiers, with a real process in the background: what it has compiled is found in the cache on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import dovetail
from dovetail.tiers import choice, process
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
