"""What goes on in a step beside forward, backward and update: clipping, loss scaling, averages, schedules; with breaks too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import captures, same
from tests.passes.test_whole_step import batch, gradients, network

Step = Callable[..., Any]
Parts = tuple[Step, list[Any]]
mse_loss = torch.nn.functional.mse_loss


def train(
    make: Callable[[torch.nn.Module], Parts],
    fullgraph: bool = True,
    steps: int = 12,
    inputs: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = batch,
) -> Any:
    """Train twins, and compare weights, gradients and all state after each step."""
    models = network(), network()
    (eager, states), (step, twin_states) = map(make, models)
    compiled = dovetail.compile(step, backend="aten", fullgraph=fullgraph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(steps):
            same(eager(*inputs(index)), compiled(*inputs(index)), f"the result of step {index}")
            for name, of in (("parameters", list), ("gradients", gradients)):
                same(of(models[0].parameters()), of(models[1].parameters()), f"{name} after step {index}")
            same([item.state_dict() for item in states], [item.state_dict() for item in twin_states], f"state {index}")
    return compiled


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_gradients_are_clipped_after_a_break(clip: str) -> None:
    """They were not: torch's own code saw no gradients on traced parameters."""

    def make(model: torch.nn.Module) -> Parts:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            print(end="")
            getattr(torch.nn.utils, clip)(model.parameters(), 0.01)
            optimizer.step()
            return loss.detach()

        return step, [optimizer]

    train(make, fullgraph=False, steps=4)


@pytest.mark.parametrize("foreach", [False, True])
def test_only_clipping_and_the_update_are_compiled(foreach: bool) -> None:
    def make(model: torch.nn.Module) -> Parts:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update() -> torch.Tensor:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
            optimizer.step()
            return norm

        return update, [optimizer]

    models = network(), network()
    (eager, _), (update, _) = map(make, models)
    compiled = dovetail.compile(update, backend="aten", fullgraph=True)
    for index in range(3):
        x, y = batch(index)
        for model in models:
            model.zero_grad()
            mse_loss(model(x), y).backward()
        same(eager(), compiled(), f"the norm in step {index}")
        same(list(models[0].parameters()), list(models[1].parameters()), f"parameters after step {index}")


def test_losses_are_scaled_and_steps_with_infinite_gradients_are_left_out() -> None:
    def make(model: torch.nn.Module) -> Parts:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step, [optimizer, scaler]

    def inputs(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch(index)
        return x, y * (float("inf") if index in (5, 6) else 1.0)

    train(make, fullgraph=False, inputs=inputs)


def line_search(model: torch.nn.Module) -> Parts:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return step, [optimizer]


def test_lbfgs_runs_its_closure_as_eager_does() -> None:
    assert captures(train(line_search, fullgraph=False, steps=6)) <= 4


def test_lbfgs_is_refused_in_one_graph() -> None:
    step, _ = line_search(network())
    with pytest.raises(GraphBreakError, match="LBFGS calls the closure"):
        dovetail.compile(step, backend="aten", fullgraph=True)(*batch(0))


def test_sparse_gradients_are_refused_by_name() -> None:
    table = torch.nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = table(tokens).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with pytest.raises(GraphBreakError, match="of a sparse tensor"):
        dovetail.compile(step, backend="aten", fullgraph=True)(torch.arange(4))


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.95**epoch),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_run_inside_the_step(name: str) -> None:
    def make(model: torch.nn.Module) -> Parts:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=name != "step")
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            return loss.detach()

        return step, [optimizer, schedule]

    assert len(train(make).entries) <= 5


def test_averages_of_weights_are_those_of_eager() -> None:
    def make(model: torch.nn.Module) -> Parts:
        optimizer = torch.optim.Adam(model.parameters())
        average = torch.optim.swa_utils.AveragedModel(model)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            return loss.detach()

        return step, [optimizer, average]

    train(make, fullgraph=False, steps=4)
