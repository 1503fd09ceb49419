"""Fused optimizers at the end of a whole step: torch's own kernel behind the graph, or arithmetic where the result is read."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.backends import ATEN, INDUCTOR, Backend
from tests.differential import Rule, same

# As Inductor, but ATen's operators run the decomposed graph: no kernels to compile.
PLAIN = Backend(
    "plain",
    ATEN.compile,
    decompositions=INDUCTOR.decompositions,
    writes_back=True,
    leaves_fused_updates=True,
    numerics="tolerance",
)
Step = Callable[[Tensor], Any]


class Program:
    """A model with an optimizer, and the step that is compiled."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer], model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.optimizer = make_optimizer(self.model.parameters())
        self.average = [weight.detach().clone() for weight in self.model.parameters()]

    def step(self, x: Tensor) -> Any:
        """Gradients are dropped at the start."""
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def dropping_at_the_end(self, x: Tensor) -> Any:
        """No gradient is left after the step."""
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def averaging(self, x: Tensor) -> Any:
        """The new weights are read inside of the step."""
        loss = self.step(x)
        with torch.no_grad():
            for mean, weight in zip(self.average, self.model.parameters(), strict=True):
                mean.lerp_(weight, 0.25)
        return loss

    def returning_weights(self, x: Tensor) -> Any:
        """A view of a weight, and a copy of it as it was, are results."""
        first = next(self.model.parameters())
        before = first.detach().clone()
        return self.step(x), before, first.detach()[0], first.detach()

    def accumulating(self, x: Tensor) -> Any:
        """The gradients before are read, and written to."""
        loss = self.model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[Any]:
        """All that a step may change."""
        found: list[Any] = [*self.model.parameters(), *self.model.buffers(), *self.average]
        found += [weight.grad for weight in self.model.parameters()]
        for values in self.optimizer.state_dict()["state"].values():
            found += values.values()
        return found


ROUNDED = Rule("close", tolerance=(1e-5, 1e-4), ignored=frozenset({"requires_grad", "is_leaf"}))


def updates_behind(step: Any) -> list[int]:
    """For each graph that was compiled, how many updates run behind it."""
    spans = [event for event in step.events.events if event.name == "compile forward"]
    return [span.details.get("updates", 0) for span in spans]


def run(program: Program, method: str, steps: int = 4, exact: bool = False, backend: Any = PLAIN) -> list[int]:
    """Compare with eager, step by step."""
    rule = True if exact else ROUNDED
    eager = copy.deepcopy(program)
    # copy.deepcopy gives the optimizer the copied parameters.
    compiled = dovetail.compile(getattr(program, method), backend=backend, fullgraph=True)
    for number in range(steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        result, expected = compiled(x), getattr(eager, method)(x)
        both = [item if isinstance(item, tuple) else (item,) for item in (result, expected)]
        same(*reversed(both), exact=rule)
        same(eager.state(), program.state(), exact=rule)
    return updates_behind(compiled)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.01, fused=True),
    "Adam amsgrad": lambda weights: torch.optim.Adam(weights, lr=0.01, fused=True, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, fused=True),
    "AdamW tensor": lambda weights: torch.optim.AdamW(weights, lr=torch.tensor(0.01), fused=True),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.01, fused=True),
    "SGD momentum": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("method", ["step", "dropping_at_the_end", "accumulating"])
@pytest.mark.sampled(15)
def test_the_kernel_runs_behind_the_graph(name: str, method: str) -> None:
    behind = run(Program(OPTIMIZERS[name]), method)
    assert behind[-1] == 1, behind


def test_groups_are_a_kernel_each() -> None:
    def make(weights: Any) -> torch.optim.Optimizer:
        first, *rest = weights
        return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest}], lr=0.01, fused=True)

    assert run(Program(make), "step")[-1] == 2


@pytest.mark.parametrize("method", ["averaging", "returning_weights"])
@pytest.mark.slow
def test_new_weights_that_are_read(method: str) -> None:
    run(Program(OPTIMIZERS["AdamW"]), method)
    assert run(Program(OPTIMIZERS["AdamW"]), "averaging")[-1] == 0


def test_gradients_that_lie_otherwise_than_their_weights() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4).t())
            self.image = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))

        def forward(self, x: Tensor) -> Tensor:
            pictures = x.repeat(1, 3).view(1, 3, 3, 4)
            return (x @ self.weight).sum(1) + nn.functional.conv2d(pictures, self.image).sum() * self.weight.t()[0, 0]

    torch.manual_seed(0)
    run(Program(OPTIMIZERS["AdamW"], Turned()), "step")


def test_a_learning_rate_that_changes() -> None:
    program = Program(OPTIMIZERS["AdamW"])
    eager = copy.deepcopy(program)
    compiled = dovetail.compile(program.step, backend=PLAIN, fullgraph=True)
    entries = []
    for number in range(6):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        for each in (program, eager):
            each.optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        same((compiled(x),), (eager.step(x),), exact=ROUNDED)
        same(program.state(), eager.state(), exact=ROUNDED)
        entries.append(len(compiled.entries))
    assert entries[-1] == entries[2], entries


def test_what_a_step_drops_is_freed_at_once() -> None:
    """A cycle around the call would keep the gradients until Python collects garbage: 100 MiB for a small BERT."""
    program = Program(OPTIMIZERS["AdamW"])
    compiled = dovetail.compile(program.step, backend=PLAIN, fullgraph=True)
    x = torch.ones(3, 4)
    for _ in range(3):
        compiled(x)
    assert updates_behind(compiled)[-1] == 1
    gc.disable()
    try:
        gradients = [weakref.ref(weight.grad) for weight in program.model.parameters() if weight.grad is not None]
        assert len(gradients) == 4
        compiled(x)
        assert [gradient() for gradient in gradients] == [None] * 4
    finally:
        gc.enable()


def test_gradients_that_are_not_finite() -> None:
    """A scaler's flag makes the kernel skip the update; the kernel would divide the gradients too, so it stays in the graph."""
    program = Program(OPTIMIZERS["AdamW"])
    eager = copy.deepcopy(program)

    def scaled(each: Program, x: Tensor, bad: Tensor) -> Tensor:
        loss = each.step(x)
        each.optimizer.grad_scale, each.optimizer.found_inf = torch.full((), 2.0), bad  # type: ignore[attr-defined]
        each.optimizer.step()
        del each.optimizer.grad_scale, each.optimizer.found_inf  # type: ignore[attr-defined]
        return loss

    compiled = dovetail.compile(scaled, backend=PLAIN, fullgraph=True)
    for number in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        bad = torch.tensor(float(number % 2))
        same((compiled(program, x, bad),), (scaled(eager, x, bad),), exact=ROUNDED)
        same(program.state(), eager.state(), exact=ROUNDED)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("backend", "method", "behind"), [(PLAIN, "step", 1), ("inductor", "step", 1), ("inductor", "averaging", 0)]
)
@pytest.mark.once("inductor")
def test_rates_betas_and_sizes_that_change(backend: Any, method: str, behind: int) -> None:
    """One more entry for all of them. Inductor fills no tensor with a number that changes."""
    program = Program(OPTIMIZERS["AdamW"])
    eager = copy.deepcopy(program)
    compiled = dovetail.compile(getattr(program, method), backend=backend, fullgraph=True)
    entries = []
    for number in range(6):
        x = torch.randn(3 + number % 3, 4, generator=torch.Generator().manual_seed(number))
        for each in (program, eager):
            each.optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
            each.optimizer.param_groups[0]["betas"] = (0.9 - 0.02 * number, 0.999)
        same((compiled(x),), (getattr(eager, method)(x),), exact=ROUNDED)
        same(program.state(), eager.state(), exact=ROUNDED)
        entries.append(len(compiled.entries))
    assert entries[-1] == entries[1] == 2, entries
    assert updates_behind(compiled)[-1] == behind
