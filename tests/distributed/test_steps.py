"""Steps of other forms: micro-batches, forces, two updates, batch norm; and ranks that are late."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import dovetail
from dovetail.distributed import data_parallel, shard
from dovetail.errors import CollectiveError
from tests.distributed.models import OPTIMIZERS, batches, weights
from tests.distributed.test_data_parallel import close
from tests.distributed.test_wrapped_modules import normed
from tests.distributed.world import run

Step = Callable[[torch.Tensor, torch.Tensor], None]


def potential(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def forces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A loss on the gradient of the model with respect to its input, and an average of the weights."""
    average = [parameter.detach().clone() for parameter in model.parameters()]

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        place = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(model(place).sum(), place, create_graph=True)
        (found.square().mean() + (model(place) - y[:, :1]).square().mean()).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, parameter in zip(average, model.parameters(), strict=True):
                kept.lerp_(parameter, 0.5)

    return step


def micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Two backwards, one step; gradients that are left in .grad are added to by the next call."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            nn.functional.mse_loss(model(part), wanted[:, :1]).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def two_updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Two whole steps in one; the second one's parameters are computed in the graph."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for factor in (1.0, 0.5):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x * factor), y[:, :1]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    return step


def only_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Gradients add up over the calls."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.mse_loss(model(x), y[:, :1]).backward()

    return step


MAKERS: dict[str, Any] = {
    "forces": forces,
    "micro_batches": micro_batches,
    "two_updates": two_updates,
    "only_backward": only_backward,
}


def trained(rank: int, size: int, kind: str, way: str) -> Any:
    model = potential(rank if way != "alone" else 0)
    if way == "sharded":
        model = shard(model, eager_optimizer=kind == "only_backward")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    made = MAKERS[kind](model, optimizer)
    step = made
    if way == "replicated":
        step = data_parallel(made, backend="aten")
    elif way == "sharded":
        step = dovetail.compile(made, backend="aten", fullgraph=True)
    for x, y in batches(3, rank, size):
        step(x, y)
    count = None
    if way == "replicated":
        graph = step.compiled.entries[0].compiled.joint.graph
        count = len(graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default))
    if kind == "only_backward":
        optimizer.step()
    return weights(model), count


def several(rank: int) -> Any:
    return {(kind, way): trained(rank, 2, kind, way) for kind in MAKERS for way in ("replicated", "sharded")}


@pytest.mark.slow
def test_steps_of_other_forms() -> None:
    first, second = run(several, 2)
    for kind in MAKERS:
        wanted, _ = trained(0, 1, kind, "alone")
        for way in ("replicated", "sharded"):
            found, count = first[kind, way]
            close(found, wanted)
            assert all(torch.equal(found[name], second[kind, way][0][name]) for name in found)
            # One for the agreement, one for the gradients: those of both micro-batches are exchanged together.
            assert count in (None, 3 if kind == "two_updates" else 2)


def with_batch_norm(rank: int) -> Any:
    """Training with DistributedDataParallel in eager, and with data_parallel in both forms."""

    def train(way: str) -> dict[str, torch.Tensor]:
        model = normed(rank)
        forward = model
        if way == "eager":
            forward = DistributedDataParallel(model)
        elif way == "model":
            forward = data_parallel(model, backend="aten")
        optimizer = OPTIMIZERS["sgd"](model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            nn.functional.mse_loss(forward(x), y).backward()
            optimizer.step()

        chosen = data_parallel(step, backend="aten") if way == "step" else step
        for x, y in batches(3, rank, 2):
            chosen(x, y)
        return weights(model)

    return {way: train(way) for way in ("eager", "model", "step")}


@pytest.mark.slow
def test_batch_norm_is_as_in_distributed_data_parallel() -> None:
    for found in run(with_batch_norm, 2):
        close(found["model"], found["eager"])
        close(found["step"], found["eager"])


def late(rank: int) -> str:
    """A rank that does not come in time, while the other is in a backward that it runs by itself."""
    model = data_parallel(potential(0), backend="aten")
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    if rank == 1:
        time.sleep(2.0)
        return ""
    # From here on; compiling may have taken longer on one rank than on the other.
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5), torch.distributed.group.WORLD)
    with pytest.raises(CollectiveError) as error:
        model(torch.ones(2, 4)).sum().backward()
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_an_error_in_the_backward_too() -> None:
    text, _ = run(late, 2)
    assert "an exchange with the other ranks has failed" in text
