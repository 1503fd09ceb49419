"""A second process of the same program runs on kernels from its first step on: no compiler, no process beside it, no Inductor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dovetail
from dovetail.aot.compile_joint import compile_joint, run_steps
from dovetail.aot.steps import CompileSettings, Lowering
from dovetail.backends import lookup_backend
from dovetail.backends.inductor import kept_code
from dovetail.options import Options
from dovetail.tiers import choice, process, swap
from dovetail.tiers.later import Collector
from tests.differential import same
from tests.tiers.fakes import FakeWorker


class Attention(nn.Module):
    """The gradient of its softmax is written with an operator that only Inductor defines (``prims.fma``)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inner(self.norm(x)).chunk(3, -1)
        scores = query @ key.transpose(-1, -2)
        found: Tensor = F.dropout(scores.softmax(-1), 0.1) @ value
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + F.gelu(self.inner(x))
        return found


def attention() -> nn.Module:
    return nn.Sequential(Attention(), Attention())


def images() -> nn.Module:
    """Running averages are written, and convolutions are computed with channels last."""
    parts = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))


INPUTS: dict[Callable[[], nn.Module], tuple[int, ...]] = {attention: (2, 5, 8), images: (2, 3, 8, 8), smooth: (6, 8)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", INPUTS)
def test_tier_0_leaves_no_mark_on_the_graphs_of_tier_1(make: Callable[[], nn.Module], monkeypatch: Any) -> None:
    """Or another process, which has no tier 0, would look for other code than this one has kept."""
    monkeypatch.delenv(choice.SWITCH, raising=False)
    monkeypatch.setattr(process, "worker", FakeWorker)
    torch.manual_seed(0)
    model, backend = make(), lookup_backend("inductor")
    alone, joint = (dovetail.capture(model, (torch.randn(INPUTS[make]),)) for _ in range(2))
    collector = Collector(backend)
    run_steps(Lowering(alone, collector.backend, CompileSettings(guarded_inputs=True, may_run_once=True)))
    run: Any = compile_joint(None, joint, choice.in_tiers(backend, Options()), for_entry=True).run
    assert isinstance(run, swap.SwappingRun)
    run._ask_for_kernels()

    def lines(graphs: Any) -> list[list[str]]:
        return [[kept_code._line(node, None) for node in item.graph.graph.nodes] for item in graphs]

    assert len(collector.graphs) == 2 and lines(run._collector.graphs) == lines(collector.graphs)


# --- two processes --------------------------------------------------------------------------------------------------------


def train_model(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    model = make()
    compiled = dovetail.compile(model, backend="inductor", **options)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = compiled(torch.randn(INPUTS.get(make, (4, 8)))).square().mean()
        loss.backward()
        losses.append(loss.item())
    return compiled, losses


def train_whole_step() -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @dovetail.compile(backend="inductor")
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(1)
    return step, [step(torch.randn(4, 8)).item() for _ in range(4)]


def train_second_order() -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    compiled, losses = dovetail.compile(smooth(), backend="inductor"), []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(INPUTS[smooth]).requires_grad_()
        (slope,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
    return compiled, losses


def train_changing_batches() -> tuple[Any, list[float]]:
    """The sizes of the second process are others."""
    torch.manual_seed(0)
    model, losses = attention(), []
    compiled = dovetail.compile(model, backend="inductor")
    second = 3 if sys.argv[1] == "fill" else 4
    for size in (2, second, 9 - second, 8):
        x = torch.arange(size * 40.0).reshape(size, 5, 8).cos()
        torch.manual_seed(size)
        loss = compiled(x).square().mean()
        loss.backward()
        torch.manual_seed(size)
        same(model(x).square().mean(), loss, exact=False)
        losses.append(loss.item())
    return compiled, [losses[0], losses[-1]]


KINDS: dict[str, Callable[[], tuple[Any, list[float]]]] = {
    "model": lambda: train_model(attention),
    "images": lambda: train_model(images),
    "changing batches": train_changing_batches,
    "whole step": train_whole_step,
    "second order": train_second_order,
    "regional": lambda: train_model(lambda: nn.Sequential(*(Block() for _ in range(3))), regional=True),
}


def main() -> None:
    """Train with each kind; print its losses and what was noted, and whether anything was loaded or started to compile."""
    found: dict[str, Any] = {}
    for name, train in KINDS.items():
        compiled, losses = train()
        assert dovetail.wait(compiled, 300)
        if sys.argv[1] == "fill":
            train()  # What was asked for late is waited for.
        logs = [dovetail.events_of(item) for item in swap._compiled_functions(compiled)]
        names = [event.name for log in logs for event in log.events]
        misses = [str(event) for log in logs for event in log.events if event.name == "cache miss"]
        found[name] = [losses, names.count("tier 0"), names.count("tier 1"), misses]
    found["compilers"] = [
        name for name in ("compile_fx", "graph", "lowering") if f"torch._inductor.{name}" in sys.modules
    ]
    found["worker"] = process._worker is not None
    print(json.dumps(found))


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "DOVETAIL_CACHE_DIR": str(tmp_path / "dovetail")}
    environment = {**os.environ, **folders, "DOVETAIL_CACHE": "1", choice.SWITCH: "auto"}
    found = []
    for part in ("fill", "look"):
        command = [
            sys.executable,
            "-W",
            "error::dovetail.EagerFallbackWarning",
            "-m",
            "tests.tiers.test_second_process",
        ]
        done = subprocess.run(
            [*command, part], capture_output=True, text=True, env=environment, timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    for name in KINDS:
        losses, operators, kernels, misses = found[1][name]
        assert (operators, misses) == (0, []) and kernels > 0, name
        assert losses == pytest.approx(found[0][name][0], rel=1e-4), name
    assert found[1]["compilers"] == [] and not found[1]["worker"]
    assert found[0]["compilers"] or found[0]["worker"]


if __name__ == "__main__":
    main()
