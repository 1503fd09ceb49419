"""One engine's training run, in a process of its own that is asked through a pipe, so that several can take turns."""

from __future__ import annotations

import ctypes
import hashlib
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.cli.gpt import GPT, GPTConfig, make_optimizer
from dovetail.cli.settings import ENGINES, Settings
from dovetail.cli.text import read_text
from dovetail.events import EventLog
from dovetail.reports.event_logs import trace_rows

#: The engines take turns, so none may compile while another one trains: after this many steps each waits for its kernels. The
#: second step is the first that finds the optimizer's state, and so the first whose kernels are those of all later ones.
SETTLED_AFTER = 2


@dataclass
class Engine:
    """A training step, compiled or not, and functions that report on its compilation."""

    step: Callable[[Tensor, Tensor], Tensor]
    capture_seconds: Callable[[], float | None] = lambda: None
    graph_breaks: Callable[[], int | None] = lambda: None
    logs: tuple[EventLog, ...] = ()
    #: Blocks until what compiles in the background is in place.
    wait: Callable[[], object] = lambda: None


def make_step(
    model: nn.Module, call: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return one step of training: the loss by ``call``, its gradients, clipping, the optimizer's update."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = call(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_engine(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    """Return the engine of this name; nothing is compiled yet.

    torch.compile gets the model, which it takes in one graph; Dovetail gets the whole step. Each compiler is imported here,
    because its import belongs to the time that its user waits for the first step.
    """
    if name not in ENGINES:
        raise ValueError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    if name == "eager":
        return Engine(make_step(model, model, optimizer))
    if name == "torch.compile":
        from dovetail.torch_private import dynamo as private_dynamo

        step = make_step(model, torch.compile(model), optimizer)
        return Engine(step, private_dynamo.dynamo_capture_seconds, private_dynamo.dynamo_graph_breaks)
    import dovetail

    compiled = dovetail.compile(make_step(model, model, optimizer), backend=name.removeprefix("dovetail-"))
    log: EventLog = dovetail.events_of(compiled)
    return Engine(
        compiled,
        lambda: log.seconds("capture") + log.seconds("partition"),
        lambda: log.count("graph break"),
        (log,),
        lambda: dovetail.wait(compiled),
    )


class Training:
    """The training loop: one optimizer step after the other, timed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.text = read_text(settings.characters)
        vocabulary = len(self.text.vocabulary)
        sizes = {name: getattr(settings, name) for name in ("block", "layers", "heads", "width")}
        self.model = GPT(GPTConfig(vocabulary, **sizes))
        self.optimizer = make_optimizer(self.model, settings.learning_rate)
        self.log = EventLog(owner="training")
        self.seconds: list[float] = []
        self.losses: list[float] = []
        start = time.perf_counter()
        self.engine = make_engine(settings.engine, self.model, self.optimizer)
        self.wait_seconds = 0.0
        self.setup_seconds = time.perf_counter() - start

    def train(self, steps: int) -> dict[str, Any]:
        """Train some steps; return their losses and seconds."""
        first = len(self.losses)
        for _ in range(steps):
            self._step()
        return {"losses": self.losses[first:], "seconds": self.seconds[first:]}

    def _step(self) -> None:
        settings, number = self.settings, len(self.losses)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(number, settings)
        tokens, targets = self.text.batch(step=number, batch=settings.batch, block=settings.block, seed=settings.seed)
        start = time.perf_counter()
        with self.log.span("step", number=number + 1):
            self.losses.append(self.engine.step(tokens, targets).item())
        self.seconds.append(time.perf_counter() - start)
        if number + 1 == SETTLED_AFTER:
            start = time.perf_counter()
            self.engine.wait()
            self.wait_seconds = time.perf_counter() - start

    def summary(self) -> dict[str, Any]:
        """Return the measurements at the end of the run."""
        # The first steps compile and warm up caches; they count for the times below, not for the speed.
        steady = self.seconds[min(3, len(self.seconds) - 1) :]
        return {
            "time_to_first_step": self.setup_seconds + self.seconds[0],
            "time_to_full_speed": self.setup_seconds + sum(self.seconds[:SETTLED_AFTER]) + self.wait_seconds,
            "steps_per_second": 1.0 / statistics.median(steady),
            "peak_memory_bytes": peak_memory_bytes(),
            "capture_seconds": self.engine.capture_seconds(),
            "graph_breaks": self.engine.graph_breaks(),
            "final_loss": self.losses[-1],
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "weights_sha256": digest(self.model),
            "trace": trace_rows([self.log, *self.engine.logs]),
        }


def learning_rate_at(step: int, settings: Settings) -> float:
    """Return the learning rate: a short linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, settings.steps // 20)
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.learning_rate * (0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, progress))))


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def digest(model: nn.Module) -> str:
    """Return a SHA-256 of all parameters and buffers, which is equal for models that are equal to the last bit."""
    total = hashlib.sha256()
    for name, value in model.state_dict().items():
        total.update(name.encode())
        plain = value.detach().cpu().contiguous()
        # Not by numpy, which a user of torch need not have.
        total.update(ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()))
    return total.hexdigest()


def serve(connection: Any) -> None:
    """Train as many steps as each message says; the first one holds the settings, and 0 asks for the summary."""
    training = Training(connection.recv())
    connection.send(None)
    while steps := connection.recv():
        connection.send(training.train(steps))
    connection.send(training.summary())
