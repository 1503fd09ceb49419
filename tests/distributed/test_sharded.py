"""Training with parameters and optimizer state in parts: the same weights as one process that has them whole."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.distributed import (
    ShardingOptions,
    exchange_shards,
    load_whole_optimizer_state,
    shard,
    whole_optimizer_state,
)
from dovetail.errors import DistributedError, OptionError, ShardedModuleError, ShardedOperationError
from tests.distributed import world
from tests.distributed.models import OPTIMIZERS, batches, build, make_step, trained_alone, weights
from tests.distributed.test_data_parallel import close
from tests.distributed.world import run


def train(rank: int, size: int, name: str, optimizer: str, bucket_bytes: int | None) -> Any:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size,))
    model = shard(build(name, rank), mesh)
    assert sum(part.numel() for part in model.parameters()) < sum(value.numel() for value in build(name).parameters())
    rule = OPTIMIZERS[optimizer](model.parameters())
    passes = () if bucket_bytes is None else (exchange_shards(ShardingOptions(bucket_bytes=bucket_bytes)),)
    step = dovetail.compile(make_step(model, rule), backend="aten", fullgraph=True, passes=passes)
    for x, y in batches(4, rank, size):
        step(x, y)
    return weights(model), whole_optimizer_state(model, rule)


@pytest.mark.parametrize(
    ("size", "name", "optimizer", "bucket_bytes"),
    [pytest.param(4, "deep", "sgd", 100, marks=pytest.mark.slow), (2, "tied", "adamw", None)],
)
def test_weights_and_state_are_those_of_one_process(
    size: int, name: str, optimizer: str, bucket_bytes: int | None
) -> None:
    found = run(train, size, size, name, optimizer, bucket_bytes)
    close(found[0][0], trained_alone(name, optimizer))
    assert all(torch.equal(found[0][0][key], other[0][key]) for other in found for key in other[0])
    model = build(name)
    alone = OPTIMIZERS[optimizer](model.parameters())
    step = make_step(model, alone)
    for x, y in batches(4):
        step(x, y)
    state, wanted = found[0][1], alone.state_dict()
    assert state["state"].keys() == wanted["state"].keys()
    for number, entries in wanted["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(state["state"][number][key], value, rtol=1e-5, atol=1e-6)


def checkpoint_and_go_on(rank: int) -> Any:
    """Two steps, everything into a checkpoint, a new model from it, two more steps; forward and optimizer apart."""
    given = list(batches(4, rank, 2))

    def begin(seed: int) -> Any:
        model = shard(build("tied", seed), eager_optimizer=True)
        return model, OPTIMIZERS["adamw"](model.parameters()), dovetail.compile(model, backend="aten", fullgraph=True)

    def advance(model: Any, optimizer: Any, compiled: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(compiled(x), y).backward()
        dovetail.distributed.clip_grad_norm_(model, 0.2)
        optimizer.step()

    first = begin(0)
    for x, y in given[:2]:
        advance(*first, x, y)
    saved = copy.deepcopy((first[0].state_dict(), whole_optimizer_state(*first[:2])))
    second = begin(rank + 10)
    second[0].load_state_dict(saved[0])
    load_whole_optimizer_state(*second[:2], saved[1])
    for x, y in given[2:]:
        advance(*second, x, y)
    return weights(second[0])


@pytest.mark.slow
def test_forward_and_optimizer_apart_and_a_checkpoint_between() -> None:
    first, second = run(checkpoint_and_go_on, 2)
    close(first, trained_alone("tied", "adamw"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    """A process group of this process only."""
    world.init(0, 1, str(tmp_path))
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "misuse",
    [
        lambda parameter: parameter.grad.mean(),
        lambda parameter: parameter.grad.max(),
        lambda parameter: parameter.grad.exp().sum(),
        lambda parameter: torch.cumsum(parameter.grad, 0),
        lambda parameter: parameter.grad[0] * 2,
    ],
    ids=["mean", "max", "sum of what is not zero in the filling", "cumsum", "index"],
)
def test_what_needs_the_whole_is_refused(misuse: Any) -> None:
    model = shard(nn.Linear(3, 2))

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x).sum().backward()
        return misuse(model.module.weight)  # type: ignore[no-any-return]

    with pytest.raises(ShardedOperationError, match=r"only a part(.|\n)*test_sharded"):
        dovetail.compile(step, backend="aten", fullgraph=True)(torch.ones(2, 3))


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_looks_at_rows_is_refused() -> None:
    model = shard(nn.Linear(3, 2))
    step = make_step(model, torch.optim.Adafactor(model.parameters()))
    with pytest.raises(ShardedOperationError):
        dovetail.compile(step, backend="aten", fullgraph=True)(torch.ones(2, 3), torch.ones(2, 2))


@pytest.mark.usefixtures("alone")
def test_eager_training_of_parts_is_refused_unless_asked_for() -> None:
    model = shard(nn.Linear(3, 2))
    with pytest.raises(DistributedError, match="eager_optimizer"):
        model(torch.ones(2, 3))
    with torch.no_grad():
        assert model(torch.ones(2, 3)).shape == (2, 2)
    again = shard(nn.Linear(3, 2), eager_optimizer=True)
    again(torch.ones(2, 3)).sum().backward()
    assert torch.equal(again.module.bias.grad, torch.full((2,), 2.0))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("place", ["before clipping", "no optimizer", "before backward"])
def test_a_step_in_several_graphs_is_refused(place: str) -> None:
    model = shard(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        loss = model(x).sum()
        if place == "before backward":
            print(end="")
        loss.backward()
        if place == "before clipping":
            print(end="")
        if place != "no optimizer":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    with pytest.raises(DistributedError, match="leave the graph"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dovetail.compile(step, backend="aten")(torch.ones(2, 3))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(3)


@pytest.mark.usefixtures("alone")
def test_modules_that_cannot_be_cut() -> None:
    with pytest.raises(ShardedModuleError, match=r"LSTM keeps its parameters under _flat_weights"):
        shard(nn.LSTM(3, 4))
    with pytest.raises(ShardedModuleError, match="no size yet"):
        shard(Lazy())
    with pytest.raises(ShardedModuleError, match="sharded already"):
        shard(nn.Sequential(shard(nn.Linear(2, 2))))
    with pytest.raises(OptionError, match="2 dimensions"):
        shard(nn.Linear(2, 2), torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1)))
