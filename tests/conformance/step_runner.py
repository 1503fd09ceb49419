"""Train small Hugging Face models with the whole step compiled: forward, loss, backward, clipping, AdamW, a schedule of rates.

``python -m tests.conformance.step_runner --models bert,t5 --backend inductor`` prints how far losses, gradients and weights are
from eager's, and how many graphs it took. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

import dovetail
from tests.conformance.model_runner import FACTORIES, MORE_FACTORIES, NEWER_FACTORIES

ALL = {**FACTORIES, **MORE_FACTORIES, **NEWER_FACTORIES}
#: Ten families of different kinds.
TEN = ("bert", "gpt2", "llama", "t5", "vit", "gpt_neox", "opt", "distilbert", "bart", "convnext")


@dataclass(frozen=True)
class StepOutcome:
    """How far a compiled training is from eager's, and what it took."""

    model: str
    loss: float
    gradients: float
    weights: float
    captures: int
    breaks: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.model:14} loss {self.loss:.1e}  gradients {self.gradients:.1e}  weights {self.weights:.1e}  "
            f"captures {self.captures}  breaks {self.breaks}  {self.seconds:.0f} s"
        )


def _step(model: torch.nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step(batch: dict[str, Any]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss.detach()

    return step


def train(name: str, backend: str, steps: int = 3) -> StepOutcome:
    """Train a model twice, in eager and compiled, on the same batches."""
    import transformers

    torch.manual_seed(0)
    model, make_batch = ALL[name](transformers)
    model.train()
    twin = copy.deepcopy(model)
    eager, compiled = _step(model), dovetail.compile(_step(twin), backend=backend)
    worst = 0.0
    begun = time.perf_counter()
    for index in range(steps):
        batch = make_batch()
        losses = []
        for call in (eager, compiled):
            torch.manual_seed(index)
            losses.append(call(batch))
        worst = max(worst, _apart([losses[0]], [losses[1]]))
    seconds = time.perf_counter() - begun
    parameters, twins = list(model.parameters()), list(twin.parameters())
    gradients = [[item.grad for item in items] for items in (parameters, twins)]
    events = dovetail.events_of(compiled)
    return StepOutcome(
        name,
        worst,
        _apart(*gradients),
        _apart(parameters, twins),
        int(events.count("capture")),
        int(events.count("graph break")),
        seconds,
    )


def _apart(expected: list[Any], found: list[Any]) -> float:
    """The greatest distance; infinite where only one of two gradients is there, or something is not finite."""
    worst = 0.0
    for left, right in zip(expected, found, strict=True):
        if (left is None) != (right is None):
            return float("inf")
        if left is not None:
            distance = float((left.detach() - right.detach()).abs().max())
            worst = max(worst, distance if distance == distance else float("inf"))
    return worst


def main() -> None:
    """Train the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(TEN))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in options.models.split(","):
        print(train(name, options.backend, options.steps), flush=True)


if __name__ == "__main__":
    main()
