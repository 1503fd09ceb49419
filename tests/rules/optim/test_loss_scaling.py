"""``torch.amp.GradScaler`` and ``ReduceLROnPlateau`` inside the step: what reads back values, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import dovetail
from dovetail.errors import GraphBreakError, OutgrownError
from tests.differential import captures, same
from tests.passes.test_whole_step import batch, network
from tests.passes.test_whole_step_parts import Parts, train

mse_loss = torch.nn.functional.mse_loss


def scaling(make_optimizer: Callable[..., torch.optim.Optimizer], unscale: bool = False, schedule: bool = False) -> Any:
    def make(model: torch.nn.Module) -> Parts:
        optimizer = make_optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        rates = lr_scheduler.StepLR(optimizer, 5) if schedule else None

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if rates is not None:
                rates.step()
            return loss.detach()

        return step, [optimizer, scaler, *([] if rates is None else [rates])]

    return make


def infinite_at(*steps: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def inputs(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch(index)
        return x, y * (float("inf") if index in steps else 1.0)

    return inputs


SCALED: dict[str, tuple[Any, int]] = {
    "sgd": (scaling(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), unscale=True), 3),
    "adam": (scaling(lambda parameters: torch.optim.Adam(parameters)), 3),
    "adamw-foreach": (scaling(lambda parameters: torch.optim.AdamW(parameters, foreach=True), True, True), 6),
    "adamw-fused": (scaling(lambda parameters: torch.optim.AdamW(parameters, fused=True)), 3),
    "radam": (scaling(lambda parameters: torch.optim.RAdam(parameters)), 4),
}


@pytest.mark.parametrize("infinite", [(), (0,), (1, 6, 7)])
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.sampled(18)
def test_a_scaled_step_is_one_graph(name: str, infinite: tuple[int, ...]) -> None:
    make, most = SCALED[name]
    compiled = train(make, steps=12, inputs=infinite_at(*infinite))
    assert len(compiled.entries) <= most


def test_the_scale_is_set_by_hand() -> None:
    models = network(), network()
    parts = [SCALED["adam"][0](model) for model in models]
    compiled = dovetail.compile(parts[1][0], backend="aten", fullgraph=True)
    for index in range(6):
        same(parts[0][0](*batch(index)), compiled(*batch(index)))
        if index == 2:
            for _, (_, scaler) in parts:
                scaler.update(4.0)
        same(parts[0][1][1].state_dict(), parts[1][1][1].state_dict())
        same(list(models[0].parameters()), list(models[1].parameters()))


def test_a_scaler_that_was_not_used_raises_as_in_eager() -> None:
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mse_loss(model(x), y)
        loss.backward()
        scaler.step(optimizer)
        return loss.detach()

    for function in (step, dovetail.compile(step, backend="aten")):
        with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
            function(*batch(0))


def test_edited_graphs_say_that_the_gradients_are_not_finite() -> None:
    step, _ = SCALED["adam"][0](network())
    compiled = dovetail.compile(step, backend="aten", fullgraph=True, passes=[lambda joint: joint])
    compiled(*batch(0))
    with pytest.raises(OutgrownError, match="GradScaler"):
        compiled(*infinite_at(1)(1))


def on_plateau(model: torch.nn.Module) -> Parts:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rates = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        rates.step(loss.detach())
        return loss.detach()

    return step, [optimizer, rates]


def test_a_plateau_is_called_behind_one_graph() -> None:
    compiled = train(on_plateau, steps=30)
    assert captures(compiled) <= 2


def test_a_plateau_whose_rate_is_read_is_refused_in_one_graph() -> None:
    step, (optimizer, _) = on_plateau(network())

    def reading(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
        return step(x, y), optimizer.param_groups[0]["lr"]

    with pytest.raises(GraphBreakError, match="ReduceLROnPlateau decides"):
        dovetail.compile(reading, backend="aten", fullgraph=True)(*batch(0))
