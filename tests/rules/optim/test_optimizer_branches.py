"""Optimizers that branch on small tensors of their state: an entry for each way of the branch, none for each value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError, GraphBreakWarning
from tests.differential import captures, same
from tests.passes.test_whole_step import OPTIMIZERS, batch, network, train
from tests.passes.test_whole_step_parts import Parts
from tests.passes.test_whole_step_parts import train as train_parts

mse_loss = torch.nn.functional.mse_loss


@pytest.mark.parametrize(
    ("name", "most"), [("radam", 3), ("radam-foreach", 3), ("asgd", 4), ("asgd-foreach", 3), ("adafactor-tensor-lr", 3)]
)
@pytest.mark.sampled(6)
def test_entries_are_as_many_as_ways(name: str, most: int) -> None:
    compiled = train(OPTIMIZERS[name], steps=12)
    assert len(compiled.entries) <= most
    reached = captures(compiled)
    for index in range(12, 20):
        compiled(*batch(index))
    assert captures(compiled) == reached


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["radam", "asgd-foreach"])
def test_a_loaded_count_takes_the_other_way(name: str) -> None:
    saved: dict[int, Any] = {}

    def reload(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if index == 1:
            saved[id(optimizer)] = copy.deepcopy(optimizer.state_dict())
        if index in (7, 9):
            optimizer.load_state_dict(copy.deepcopy(saved[id(optimizer)]))

    train(OPTIMIZERS[name], steps=12, between=reload)


@pytest.mark.slow
def test_parameters_may_differ_in_their_count() -> None:
    def freeze(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        next(model.parameters()).requires_grad_(index >= 4)

    train(OPTIMIZERS["radam"], steps=12, between=freeze)


AVERAGES: dict[str, dict[str, Any]] = {
    "equal": {},
    "exponential": {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)},
    "one by one": {"avg_fn": torch.optim.swa_utils.get_ema_avg_fn(0.9)},
    "buffers too": {"use_buffers": True, "multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)},
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.sampled(4)
def test_averaged_models_take_two_entries(name: str) -> None:
    def make(model: torch.nn.Module) -> Parts:
        model.add_module("normed", torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam(model.parameters())
        average = torch.optim.swa_utils.AveragedModel(model, **AVERAGES[name])

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            return loss.detach()

        return step, [optimizer, average]

    assert len(train_parts(make, steps=20).entries) == 2


def test_the_same_branch_in_the_users_code() -> None:
    count = torch.tensor(0)

    def step(x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        count.add_(1)
        return x * 2 if (count if given is None else given) > 2 else x

    compiled = dovetail.compile(step, backend="aten", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(4)] == [1, 1, 2, 2]
    assert count == 4
    # One for each way. A number that comes with the call may be another one each time.
    assert len(compiled.entries) == 2
    with pytest.raises(GraphBreakError, match="a branch depends on the values"):
        compiled(torch.ones(1), torch.tensor(3))


def test_a_step_that_a_loss_decides_on_is_broken_off() -> None:
    def make() -> tuple[torch.nn.Module, Any]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            if loss > 1:
                optimizer.step()
            return loss.detach()

        return model, step

    (eager_model, eager), (model, step) = make(), make()
    compiled = dovetail.compile(step, backend="aten")
    with pytest.warns(GraphBreakWarning, match="a branch depends on the values"):
        for index in range(4):
            same(eager(*batch(index)), compiled(*batch(index)))
            same(list(eager_model.parameters()), list(model.parameters()))


@pytest.mark.slow
def test_where_the_state_is_of_another_kind_the_guard_does_not_hold() -> None:
    def change(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if index == 3:
            for state in optimizer.state.values():
                state["step"] = state["step"].double()

    train(OPTIMIZERS["radam"], steps=8, between=change)


FUSED: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True, amsgrad=True, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_take_rates_that_change(name: str) -> None:
    def change(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (index + 1)
            if "betas" in group:
                group["betas"] = (0.9 - 0.01 * index, group["betas"][1])
            if "momentum" in group:
                group["momentum"] = 0.9 - 0.01 * index

    compiled = train(FUSED[name], steps=20, between=change)
    # The first step makes the state; rate and betas change at the second.
    assert len(compiled.entries) <= 3


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_fused_optimizers_with_rates_that_change_are_arithmetic_for_inductor(name: str) -> None:
    def change(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (index + 1)

    compiled = train(FUSED[name], steps=6, between=change, backend="inductor")
    assert len(compiled.entries) <= 3


def test_a_number_is_found_among_keys() -> None:
    def function(x: torch.Tensor, number: int) -> tuple[torch.Tensor, bool, bool]:
        table, kept = {4: "a", "b": 1, 9: "c"}, {3, 12}
        return x * number, number in table, number in kept

    compiled = dovetail.compile(function, backend="aten", fullgraph=True, dynamic=True)
    x = torch.ones(3)
    for number in (6, 7, 4, 9, 5, 3, 12, 2, 30, 31, 8, -1, 1):
        same(function(x, number), compiled(x, number))
    assert len(compiled.entries) <= 12
