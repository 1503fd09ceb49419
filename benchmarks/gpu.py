"""Training steps on a GPU: eager, torch.compile, its ``reduce-overhead`` mode, and Dovetail with CUDA graphs.

Two models: a GPT, and one of many small kernels (a deep stack of narrow layers with normalisation, activation and residual
sums), where launching costs more than computing. A step is forward, backward, and the step of a fused AdamW, which is eager's
for all engines but those called "whole step": there Dovetail compiles all three as one graph. Every engine trains a copy of the
same model on the same batches; losses are compared with eager's at the end, so that nobody is fast and wrong. One engine runs
at a time and frees its memory, so that its peak is its own; the table has the median of its rounds. Memory is the allocator's
reserved memory while training at a steady pace: memory inside recordings is not counted as allocated.

Run it with ``make bench-gpu``. Without a GPU it says so and ends. ``--simulate`` runs everything on the CPU, with the recorder
that behaves like CUDA, to see that it works; its times mean nothing.
"""

from __future__ import annotations

import copy
import gc
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from measuring import describe, make_parser, positive, save
from torch import nn

import dovetail
from dovetail.backends.cudagraphs import release_recordings
from dovetail.cli.gpt import GPT, GPTConfig
from dovetail.reports.table import Table

#: "cpu" with ``--simulate``.
DEVICE = "cuda"

Loss = Callable[..., torch.Tensor]


class Narrow(nn.Module):
    """A model of many small kernels: ``depth`` residual blocks of a narrow layer each."""

    def __init__(self, depth: int = 60, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of the last block's output."""
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + torch.tanh(layer(norm(x))) * 0.1
        return (x - target).pow(2).mean()


def gpt(small: bool) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    """Return a GPT and batches of random text for it."""
    config = GPTConfig(vocabulary=256, block=128, layers=4, heads=4, width=128)
    if not small:
        config = GPTConfig(vocabulary=4096, block=256, layers=6, heads=6, width=384)
    shape = (4 if small else 16, config.block)
    batches = [
        (torch.randint(config.vocabulary, shape, device=DEVICE), torch.randint(config.vocabulary, shape, device=DEVICE))
        for _ in range(8)
    ]
    return GPT(config).to(DEVICE), batches


def narrow(small: bool) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    """Return the model of many small kernels, and batches for it."""
    model = Narrow(depth=20 if small else 60)
    batches = [(torch.randn(32, 64, device=DEVICE), torch.randn(32, 64, device=DEVICE)) for _ in range(8)]
    return model.to(DEVICE), batches


MODELS: dict[str, Callable[[bool], tuple[nn.Module, list[tuple[torch.Tensor, ...]]]]] = {
    "GPT": gpt,
    "many small kernels": narrow,
}


def loss_of(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    """Return the model's loss: the function that is compiled."""
    return model(*batch)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Engine:
    """A way to run the steps: ``compile`` gets the loss, or with ``whole`` a function that is the whole step."""

    compile: Callable[[Callable[..., torch.Tensor]], Loss]
    whole: bool = False


def _dovetail(kernels: str, *, whole: bool = False) -> Engine:
    def compile_with_graphs(function: Callable[..., torch.Tensor]) -> Loss:
        options: dict[str, Any] = {"kernels": kernels, **({"recorder": "simulated"} if DEVICE == "cpu" else {})}
        return dovetail.compile(function, backend="cudagraphs", backend_options=options, fullgraph=True)  # type: ignore[no-any-return]

    return Engine(compile_with_graphs, whole)


ENGINES: dict[str, Engine] = {
    "eager": Engine(lambda function: function),
    "torch.compile": Engine(lambda function: torch.compile(function, fullgraph=True)),
    "reduce-overhead": Engine(lambda function: torch.compile(function, fullgraph=True, mode="reduce-overhead")),
    "Dovetail, aten": _dovetail("aten"),
    "Dovetail, inductor": _dovetail("inductor"),
    "Dovetail, aten, whole step": _dovetail("aten", whole=True),
    "Dovetail, inductor, whole step": _dovetail("inductor", whole=True),
}


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    """Return forward, backward and the optimizer's step as one function."""

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def separate_step(loss_function: Loss, model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    """Return the same step with eager's optimizer around a compiled loss."""

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = loss_function(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


@dataclass
class Run:
    """One engine with a model of its own."""

    name: str
    step: Loss
    batches: list[tuple[torch.Tensor, ...]]
    first: float = 0.0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reserved: int = 0

    def train(self, steps: int, keep: bool = False) -> float:
        """Run steps; return the mean seconds of one."""
        _synchronize()
        start = time.perf_counter()
        for number in range(steps):
            if self.name == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            loss = self.step(*self.batches[number % len(self.batches)])
            if keep:
                self.losses.append(float(loss))
        _synchronize()
        return (time.perf_counter() - start) / steps


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _free_memory() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _reserved(*, peak: bool) -> int:
    if DEVICE == "cpu":
        return 0
    return torch.cuda.max_memory_reserved() if peak else torch.cuda.memory_reserved()


def _measure_engine(
    name: str, model: nn.Module, batches: list[tuple[torch.Tensor, ...]], rounds: int, steps: int
) -> Run:
    _free_memory()
    held = _reserved(peak=False)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
    engine = ENGINES[name]
    if engine.whole:
        step = engine.compile(whole_step(twin, optimizer))
    else:
        step = separate_step(engine.compile(loss_of), twin, optimizer)
    run = Run(name, step, batches)
    start = time.perf_counter()
    run.train(1, keep=True)
    run.first = time.perf_counter() - start
    # Warming up and recording take a few steps, and more memory than those after them.
    run.train(7, keep=True)
    _free_memory()
    run.train(steps)
    run.reserved = _reserved(peak=True) - held
    run.seconds = [run.train(steps) for _ in range(rounds)]
    return run


def measure(name: str, small: bool, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Run all engines on one model; return the numbers of each."""
    torch.manual_seed(0)
    model, batches = MODELS[name](small)
    results: dict[str, dict[str, Any]] = {}
    wanted: list[float] = []
    for engine in ENGINES:
        try:
            run = _measure_engine(engine, model, batches, rounds, steps)
        except Exception as error:  # noqa: BLE001 - one engine that fails does not end the comparison
            results[engine] = {"failed": describe(error)}
        else:
            wanted = wanted or run.losses
            results[engine] = {
                "step_ms": statistics.median(run.seconds) * 1e3,
                "first_step_s": run.first,
                "reserved_mb": run.reserved / 2**20,
                "loss_difference": max(abs(left - right) for left, right in zip(wanted, run.losses, strict=True)),
            }
            del run
        torch.compiler.reset()
        gc.collect()
        release_recordings()
    return results


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        return row["failed"], "", "", ""
    return (
        f"{row['step_ms']:.2f}",
        f"{row['reserved_mb']:.0f}",
        f"{row['first_step_s']:.1f}",
        f"{row['loss_difference']:.1e}",
    )


def main() -> int:
    """Run the comparison, print the tables, save the raw numbers."""
    global DEVICE
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--steps", type=positive, default=20, help="steps in a round")
    parser.add_argument("--small", action="store_true", help="small models")
    parser.add_argument("--simulate", action="store_true", help="run on the CPU; times mean nothing")
    options = parser.parse_args()
    if options.simulate:
        DEVICE = "cpu"
    elif not torch.cuda.is_available():
        print("bench-gpu: torch finds no CUDA device here, so there is nothing to measure.")
        return 0
    warnings.simplefilter("default")
    torch.set_float32_matmul_precision("high")
    device = "simulated on the CPU" if options.simulate else torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, Python {platform.python_version()}")
    results: dict[str, Any] = {}
    for name in MODELS:
        results[name] = measure(name, options.small, options.rounds, options.steps)
        rows = tuple((engine, *_cells(row)) for engine, row in results[name].items())
        print(f"\n{name}")
        print(Table(("engine", "step, ms", "reserved, MB", "first step, s", "loss differs by"), rows))
    save("gpu", options, device=device, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
