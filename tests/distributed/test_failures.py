"""Ranks that differ, ranks that die, and programs that cannot be right: an error of its own for each."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.distributed import ShardingOptions, data_parallel, exchange_shards, shard
from dovetail.errors import (
    CollectiveError,
    DistributedError,
    GraphBreakError,
    HigherOrderGradientError,
    NotReducedError,
    OptionError,
    RanksDifferError,
)
from tests.distributed import world
from tests.distributed.models import OPTIMIZERS, Tied, batches, build, make_step, weights
from tests.distributed.test_data_parallel import close
from tests.distributed.world import outcomes_of, run


def different_ways(rank: int) -> Any:
    model = build("deep")
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor, short: bool) -> None:
        optimizer.zero_grad()
        hidden = model[0](x)
        nn.functional.mse_loss(hidden[:, :2] if short else model[1:](hidden), y).backward()
        optimizer.step()

    compiled = data_parallel(step, backend="aten")
    x, y = next(batches(1, rank, 2))
    compiled(x, y, False)
    before = weights(model)
    with pytest.raises(RanksDifferError) as error:
        compiled(x, y, rank == 1)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    compiled(x, y, False)  # The ranks still understand each other.
    # Another batch size on one rank only: it compiles again, and exchanges the same.
    compiled(*(item[: 3 - rank] for item in (x, y)), False)
    return str(error.value), weights(model)


@pytest.mark.slow
def test_ranks_that_take_different_ways_say_so_and_go_on() -> None:
    (first, weights_0), (second, weights_1) = run(different_ways, 2)
    assert "rank 0 and rank 1 would exchange different things" in first
    assert "all_reduce" in first and "rank 1 and rank 0" in second
    assert all(torch.equal(weights_0[name], weights_1[name]) for name in weights_0)


def different_outputs(rank: int) -> str:
    model = build("two heads")
    compiled = data_parallel(model, backend="aten", bucket_megabytes=30 / 2**20)
    x = torch.ones(2, 4)
    compiled(x)[0].sum().backward()
    assert model.right.weight.grad is None and model.left.weight.grad is not None
    with pytest.raises(RanksDifferError) as error:
        compiled(x)[rank].sum().backward()
    sum(compiled(x)).sum().backward()
    model.zero_grad()
    data_parallel(model, backend="aten", reduction="sum")(x)[0].sum().backward()
    assert torch.equal(model.left.bias.grad, torch.full((3,), 4.0))
    return str(error.value)


@pytest.mark.slow
def test_ranks_whose_losses_read_different_outputs() -> None:
    for text in run(different_outputs, 2):
        assert "backward from output 0 of 2" in text and "backward from output 1 of 2" in text


def a_rank_dies(rank: int) -> Any:
    model = build("deep")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    compiled = data_parallel(make_step(model, optimizer), backend="aten")
    (first, second) = batches(2, rank, 2)
    compiled(*first)
    if rank == 1:
        os._exit(3)
    before = weights(model)
    with pytest.raises(CollectiveError) as error:
        compiled(*second)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    torch.distributed.destroy_process_group()
    world.init(0, 1, world.here[2], "second store")
    reference = build("deep")
    reference.load_state_dict(model.state_dict())
    other = OPTIMIZERS["sgd"](reference.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    compiled(*second)
    make_step(reference, other)(*second)
    close(weights(model), weights(reference))
    return str(error.value)


def test_a_rank_that_dies_is_named_and_the_rest_can_go_on() -> None:
    (kind, text), (_, code) = outcomes_of(a_rank_dies, 2)
    assert kind == "returned", text
    assert "an exchange with the other ranks has failed" in text and "init_process_group" in text
    assert code == 3


def different_models(rank: int) -> list[str]:
    """Another shape, and another device, on one rank only; then a mesh without this rank, and one bigger than the world."""
    texts = []
    for other in (nn.Linear(3, 3), nn.Linear(3, 2, device="meta")):
        with pytest.raises(DistributedError) as error:
            data_parallel(other if rank else nn.Linear(3, 2), backend="aten")(torch.ones(2, 3))
        texts.append(str(error.value))
    with pytest.raises(RuntimeError, match="bigger than default world size 2"):  # torch's own words
        shard(nn.Linear(3, 2), torch.distributed.init_device_mesh("cpu", (3,)))
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0])
    if rank:
        with pytest.raises(DistributedError, match="this rank is not in the mesh"):
            shard(nn.Linear(3, 2), mesh)
    return texts


def test_models_of_different_shape_are_refused_before_anything_is_sent() -> None:
    for texts in run(different_models, 2):
        assert len(texts) == 2 and all("different number, shape or dtype, or on devices" in text for text in texts)


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    """A process group of this process only."""
    world.init(0, 1, str(tmp_path))
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_parameter_that_is_written_from_gradients_nobody_reduced() -> None:
    model = nn.Linear(3, 1)

    def step(x: torch.Tensor) -> None:
        found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.sub_(0.1 * gradient)

    with pytest.raises(NotReducedError, match=r"weight.*own data(.|\n)*loss.backward"):
        data_parallel(step, backend="aten")(torch.ones(2, 3))


@pytest.mark.usefixtures("alone")
def test_what_would_run_eagerly_is_an_error() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        print("a break")
        return x.sum()

    with pytest.raises(GraphBreakError):
        data_parallel(step, backend="aten")(torch.ones(2))
    with pytest.raises(OptionError, match="fullgraph"):
        data_parallel(step, fullgraph=False)


@pytest.mark.usefixtures("alone")
def test_second_derivatives_are_refused() -> None:
    model = Tied()
    compiled = data_parallel(model, backend="aten")
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(HigherOrderGradientError):
        torch.autograd.grad(compiled(x).sum(), x, create_graph=True)[0].sum().backward()


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", ["replicated", "sharded"])
@pytest.mark.parametrize("bucket_bytes", [30, 1 << 20])
def test_what_the_loss_does_not_read_has_no_gradient(way: str, bucket_bytes: int) -> None:
    reference, model = build("two heads"), build("two heads")
    if way == "replicated":
        compiled = data_parallel(model, backend="aten", bucket_megabytes=bucket_bytes / 2**20)
    else:
        passes = (exchange_shards(ShardingOptions(bucket_bytes=bucket_bytes)),)
        compiled = dovetail.compile(shard(model, eager_optimizer=True), backend="aten", fullgraph=True, passes=passes)
    x = torch.ones(2, 4)
    for forward in (reference, compiled):
        forward(x)[1].square().sum().backward()
    for wanted, found in zip(reference.parameters(), model.parameters(), strict=True):
        assert (wanted.grad is None) is (found.grad is None)
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.usefixtures("alone")
def test_what_is_no_mesh() -> None:
    for wrong in ("cpu", torch.distributed.group.WORLD):
        with pytest.raises(OptionError, match="is no device mesh"):
            shard(nn.Linear(3, 1), wrong)


@pytest.mark.usefixtures("alone")
def test_parameters_without_memory_under_fully_shard() -> None:
    """The graph says what is missing; where it may break, eager does (the first time: its second call has another error)."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(3, 1, device="meta"))
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.ones(2, 3), torch.ones(2, 1)
    with pytest.raises(GraphBreakError, match=r"weight is under fully_shard, and on the meta device(.|\n)*to_empty"):
        dovetail.compile(step, backend="aten", fullgraph=True)(*batch)
    with pytest.raises(RuntimeError, match="materialized from meta device"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dovetail.compile(step, backend="aten")(*batch)


@pytest.mark.usefixtures("alone")
def test_inside_of_another_compiled_function_it_does_not_lose_its_exchanges() -> None:
    compiled = data_parallel(nn.Linear(3, 1), backend="aten")

    def outer(x: torch.Tensor) -> torch.Tensor:
        return compiled(x) * 2

    with pytest.raises((GraphBreakError, DistributedError)):
        dovetail.compile(outer, backend="aten", fullgraph=True)(torch.ones(2, 3))


def test_without_a_process_group() -> None:
    with pytest.raises(DistributedError, match="no process group"):
        data_parallel(nn.Linear(3, 1), backend="aten")(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("name", "value"), [("reduction", "median"), ("bucket_megabytes", 0), ("bucket_megabytes", "1")]
)
def test_options_that_make_no_sense(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        data_parallel(nn.Linear(3, 1), **{name: value})
