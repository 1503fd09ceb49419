"""Modules that torch itself has prepared for several processes: DistributedDataParallel, FSDP, DTensor."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dovetail
from dovetail.distributed import data_parallel, shard
from dovetail.errors import DistributedError, EagerFallbackWarning, ShardedModuleError
from tests.distributed.models import OPTIMIZERS, batches, make_step, weights
from tests.distributed.test_data_parallel import close
from tests.distributed.world import run


def normed(seed: int) -> nn.Module:
    """A model with buffers that every forward writes to."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 2))


def wrapped(rank: int) -> dict[str, Any]:
    """The weights after the same training, with the wrapped model at different places of what is compiled."""

    def train(place: str) -> dict[str, torch.Tensor]:
        model = normed(rank)
        inner = dovetail.compile(model, backend="aten", fullgraph=True) if place == "inside" else model
        outer = DistributedDataParallel(inner, bucket_cap_mb=1e-4)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        forward = dovetail.compile(outer, backend="aten") if place == "outside" else outer

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            with outer.no_sync():
                nn.functional.mse_loss(forward(x[:2]), y[:2]).backward()
            nn.functional.mse_loss(forward(x[2:]), y[2:]).backward()
            optimizer.step()

        chosen = dovetail.compile(step, backend="aten", fullgraph=True) if place == "step" else step
        for x, y in batches(4, rank, 2):
            chosen(x, y)
        return weights(model)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", EagerFallbackWarning)
        results: dict[str, Any] = {place: train(place) for place in ("eager", "inside", "outside", "step")}
    results["warnings"] = [str(item.message) for item in found if issubclass(item.category, EagerFallbackWarning)]
    return results


@pytest.mark.slow
def test_distributed_data_parallel_keeps_its_numbers() -> None:
    for found in run(wrapped, 2):
        eager = found["eager"]
        for place in ("inside", "outside"):
            assert all(torch.equal(found[place][name], value) for name, value in eager.items())
        close(found["step"], eager)
        texts = found["warnings"]
        assert texts and all("DistributedDataParallel(dovetail.compile(model))" in text for text in texts)


class Talking(nn.Module):
    """A module in which the graph is broken."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.place == "first":
            print(end="")
        x = self.layer(x)
        if self.place == "last":
            print(end="")
        return x


def broken(rank: int, place: str) -> Any:
    found = []
    for compiled in (False, True):
        model = Talking(place)
        step = make_step(DistributedDataParallel(model), OPTIMIZERS["sgd"](model.parameters()))
        chosen = dovetail.compile(step, backend="aten") if compiled else step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for x, y in batches(2, rank, 2):
                chosen(x, y)
        found.append(weights(model))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_graph_that_is_broken_inside_of_the_wrapped_module(place: str) -> None:
    for eager, compiled in run(broken, 2, place):
        assert all(torch.equal(compiled[name], value) for name, value in eager.items())


def one_speaks(rank: int) -> Any:
    """The first rank alone breaks its graph, in front of the module's call, behind the backward, or behind the update."""
    found = []
    for place in ("", "first", "backward", "last", "micro"):

        def say(now: str, place: str = place) -> None:
            if rank == 0 and place == now:
                print(end="")

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Linear(4, 2))
        outer = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        optimizer = OPTIMIZERS["adamw"](model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            say("first")
            optimizer.zero_grad()
            with outer.no_sync():
                nn.functional.mse_loss(outer(x[:2]), y[:2]).backward()
            say("micro")
            loss = nn.functional.mse_loss(outer(x[2:]), y[2:])
            loss.backward()
            say("backward")
            optimizer.step()
            say("last")
            return loss.detach()

        for chosen in (step, dovetail.compile(step, backend="aten")):
            model.load_state_dict({name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()})
            optimizer.state.clear()
            with warnings.catch_warnings(record=True) as texts:
                warnings.simplefilter("always")
                losses = [chosen(x, y) for x, y in batches(3, rank, 2)]
            assert not [item for item in texts if "runs eagerly" in str(item.message)], place
            found.append([*losses, *weights(model).values()])
    return found


@pytest.mark.slow
def test_a_rank_that_breaks_its_graph_alone_exchanges_the_same() -> None:
    """A line of a log is no reason for another plan: gradients are exchanged in the graph that has the backward."""
    for found in run(one_speaks, 2, seconds=120.0):
        for values in found:
            assert all(map(torch.equal, values, found[0]))


class Branching(nn.Module):
    """Two blocks, one of which a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2)]
        self.blocks, self.head, self.takes_both = nn.ModuleList(blocks), nn.Linear(4, 2), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0](x)
        return self.head(x + self.blocks[1](x) if self.takes_both else x)  # type: ignore[no-any-return]


OF_WRAPPER: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"static_graph": True},
    "recomputed": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "hooked": {},
}


def with_options(kind: str, place: str, rank: int) -> list[torch.Tensor]:
    """Parameters after training with the wrapper's options, with compiled parts at a place."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model: Any = Branching()
    blocks: Any = model.blocks
    if kind == "recomputed":
        model.blocks = blocks = nn.ModuleList(map(checkpoint_wrapper, blocks))
    inner: Any = dovetail.compile(model, backend="aten", fullgraph=True) if place == "inside" else model
    for when in ("blocks before", "blocks after"):
        if when == "blocks after":
            outer = DistributedDataParallel(inner, bucket_cap_mb=1e-4, **OF_WRAPPER[kind])
        if place == when:
            for index, block in enumerate(blocks):
                blocks[index] = dovetail.compile(block, backend="aten", fullgraph=True)
    if kind == "hooked":
        outer.register_comm_hook(None, fp16_compress_hook)
    forward = dovetail.compile(outer, backend="aten") if place == "outside" else outer
    step = make_step(forward, OPTIMIZERS["adamw"](model.parameters()))
    chosen = dovetail.compile(step, backend="aten") if place == "step" else step
    for number, (x, y) in enumerate(batches(4, rank, 2)):
        model.takes_both = kind != "unused" or number % 2 == 0
        chosen(x, y)
    return [parameter.detach().clone() for parameter in model.parameters()]


def all_options(rank: int, kind: str) -> dict[str, list[torch.Tensor]]:
    places = ("eager", "blocks before", "blocks after", "inside", "outside", "step")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {place: with_options(kind, place, rank) for place in places}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_WRAPPER)
def test_options_of_the_wrapper(kind: str) -> None:
    model: Any = Branching()
    step = make_step(model, OPTIMIZERS["adamw"](model.parameters()))
    for number, (x, y) in enumerate(batches(4)):
        model.takes_both = kind != "unused" or number % 2 == 0
        step(x, y)
    for found in run(all_options, 2, kind, seconds=200.0):
        for values in found.values():
            for value, wanted, alone in zip(values, found["eager"], model.parameters(), strict=True):
                assert torch.equal(value, wanted)
                torch.testing.assert_close(value, alone, rtol=1e-4, atol=5e-3 if kind == "hooked" else 1e-5)


def refusals(rank: int) -> list[str]:
    """What is said about modules whose parameters are spread over ranks already, and about two that would exchange gradients."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=mesh)
    x = torch.ones(2, 4)
    texts = []
    for attempt in (lambda: data_parallel(model, backend="aten")(x), lambda: shard(model, mesh)):
        with pytest.raises(ShardedModuleError) as error:
            attempt()
        texts.append(str(error.value))
    plain = nn.Linear(4, 2)
    replica = DistributedDataParallel(plain)
    step = data_parallel(make_step(replica, OPTIMIZERS["sgd"](plain.parameters())), backend="aten")
    with pytest.raises(DistributedError, match="both would exchange"):
        step(x, torch.ones(2, 2))
    # A DTensor is a tensor like any other to a compiled function.
    spread = nn.Linear(4, 2)
    for name in ("weight", "bias"):
        value = distribute_tensor(getattr(spread, name).detach(), mesh, [Replicate()])
        setattr(spread, name, nn.Parameter(value))
    given = distribute_tensor(x, mesh, [Replicate()])
    found = []
    for forward in (spread, dovetail.compile(spread, backend="aten")):
        spread.zero_grad()
        forward(given).sum().to_local().backward()
        found.append(spread.weight.grad.to_local())
    assert torch.equal(found[0], found[1])
    return texts


@pytest.mark.slow
def test_modules_that_are_spread_already_are_refused_by_name() -> None:
    for texts in run(refusals, 2):
        assert all("DTensor" in text for text in texts)
