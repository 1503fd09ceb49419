"""One engine's training run in a process of its own, driven by lines of JSON on a pipe.

The parent writes one line of JSON with the :class:`Settings`, then one number per line: how many steps to train now.
The worker answers each with the steps' losses and seconds. At the end of input it sends its summary and exits.
So the parent can let several workers take turns, and only one of them computes at any time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from dovetail.cli.gpt import GPT, GPTConfig, make_optimizer
from dovetail.cli.text import read_text
from dovetail.events import EventLog

#: The engines of the demo, in the order in which they are shown.
ENGINES = ("eager", "torch.compile", "dovetail-aten", "dovetail-inductor")


@dataclass(frozen=True)
class Settings:
    """What a worker trains and how; equal settings but for ``engine`` see the same weights and the same batches."""

    engine: str
    layers: int
    heads: int
    width: int
    block: int
    batch: int
    steps: int
    characters: int
    learning_rate: float
    seed: int
    threads: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


@dataclass
class Engine:
    """A compiled (or not compiled) training step, and how to read off what its compilation did."""

    step: Callable[[Tensor, Tensor], Tensor]
    capture_seconds: Callable[[], float | None]
    graph_breaks: Callable[[], int | None]
    trace_rows: Callable[[], list[dict[str, Any]]]


def make_step(
    model: nn.Module, call: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], Tensor]:
    """One step of training: the loss by ``call``, its gradients, clipping, the optimizer's update."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = call(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_engine(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    """The step under the engine of this name; nothing is compiled yet.

    torch.compile is given the model, which is what it takes in one graph; Dovetail is given the whole step.
    """
    if name == "eager":
        return Engine(make_step(model, model, optimizer), lambda: None, lambda: None, list)
    if name == "torch.compile":
        from dovetail.torch_private import dynamo as private_dynamo

        return Engine(
            make_step(model, torch.compile(model), optimizer),
            private_dynamo.dynamo_capture_seconds,
            private_dynamo.dynamo_graph_breaks,
            list,
        )
    if name in ENGINES:
        import dovetail

        compiled = dovetail.compile(make_step(model, model, optimizer), backend=name.removeprefix("dovetail-"))
        log: EventLog = dovetail.events_of(compiled)
        return Engine(
            compiled,
            lambda: log.seconds("capture") + log.seconds("partition"),
            lambda: log.count("graph break"),
            lambda: _rows(log),
        )
    raise ValueError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")


class Training:
    """The training loop: one optimizer step after the other, timed."""

    def __init__(self, settings: Settings, import_seconds: float = 0.0) -> None:
        self.settings = settings
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.text = read_text(settings.characters)
        config = GPTConfig(
            vocabulary=len(self.text.vocabulary),
            block=settings.block,
            layers=settings.layers,
            heads=settings.heads,
            width=settings.width,
        )
        self.model = GPT(config)
        self.optimizer = make_optimizer(self.model, settings.learning_rate)
        self.log = EventLog()
        self.done = 0
        self.seconds: list[float] = []
        self.losses: list[float] = []
        # A compiler's own import belongs to the time that its user waits for the first step.
        start = time.perf_counter()
        self.engine = make_engine(settings.engine, self.model, self.optimizer)
        own_import = import_seconds if settings.engine.startswith("dovetail") else 0.0
        self.setup_seconds = time.perf_counter() - start + own_import

    def train(self, steps: int) -> dict[str, Any]:
        """Train some steps; their losses and seconds."""
        first = self.done
        for _ in range(steps):
            self._step()
        return {"losses": self.losses[first:], "seconds": self.seconds[first:]}

    def summary(self) -> dict[str, Any]:
        """What there is to say at the end of the run."""
        # The first steps compile and warm up caches; they are in time_to_second_step, not in the speed.
        steady = self.seconds[min(3, len(self.seconds) - 1) :]
        return {
            # The second one is the first that finds the state of the optimizer: a compiler may put its kernels off until then.
            "time_to_second_step": self.setup_seconds + sum(self.seconds[:2]),
            "steps_per_second": 1.0 / statistics.median(steady),
            "peak_memory_bytes": peak_memory_bytes(),
            "capture_seconds": self.engine.capture_seconds(),
            "graph_breaks": self.engine.graph_breaks(),
            "final_loss": self.losses[-1],
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "weights_sha256": digest(self.model),
            "trace": _rows(self.log) + self.engine.trace_rows(),
        }

    def _step(self) -> None:
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.done, settings)
        tokens, targets = self.text.batch(
            step=self.done, batch=settings.batch, block=settings.block, seed=settings.seed
        )
        start = time.perf_counter()
        with self.log.span("step", number=self.done + 1):
            self.losses.append(self.engine.step(tokens, targets).item())
        self.seconds.append(time.perf_counter() - start)
        self.done += 1


def learning_rate_at(step: int, settings: Settings) -> float:
    """A short linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, settings.steps // 20)
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.learning_rate * (0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, progress))))


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def digest(model: nn.Module) -> str:
    """A SHA-256 of all parameters and buffers: equal for two models that are equal to the last bit."""
    total = hashlib.sha256()
    for name, value in model.state_dict().items():
        total.update(name.encode())
        total.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def serve(lines: TextIO, answers: TextIO, import_seconds: float) -> None:
    """Answer the parent's lines until there are no more."""

    def answer(data: dict[str, Any]) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    training = Training(Settings(**json.loads(lines.readline())), import_seconds)
    answer({"ready": True})
    for line in lines:
        answer(training.train(int(line)))
    answer(training.summary())


def main(import_seconds: float = 0.0) -> None:
    """The process's entry: the pipe is standard output, so whatever else is printed goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers, import_seconds)


def _rows(log: EventLog) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        rows: list[dict[str, Any]] = json.loads(log.write_trace(Path(folder) / "trace.json").read_text())["traceEvents"]
    return rows
