"""Checkpoints of ``torch.distributed.checkpoint``: written by some ranks and read by others, with compiled modules and without."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.distributed import data_parallel
from tests.distributed.models import batches
from tests.distributed.test_fully_sharded import Model, whole
from tests.distributed.world import outcomes_of, run

_compile = functools.partial(dovetail.compile, backend="aten")


def prepared(place: str, ranks: int) -> tuple[Any, Any, Any]:
    """A model, what is called in its place, and its optimizer; the parameters in shards unless ``place`` says otherwise."""
    from torch.distributed.fsdp import fully_shard

    model: Any = Model()
    for index, block in enumerate(model.blocks):
        made = _compile(block, fullgraph=True) if place in ("blocks", "copies") else block
        model.blocks[index] = made if place in ("alone", "copies", "whole") else fully_shard(made)
    if place in ("blocks", "eager", "step"):
        fully_shard(model)
    forward = (
        _compile(model) if place == "whole" else data_parallel(model, backend="aten") if place == "copies" else model
    )
    return model, forward, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(forward: Any, optimizer: Any, start: int, end: int, rank: int, ranks: int, compiles: bool = False) -> None:
    """The steps from ``start`` to ``end`` on this rank's part of the batches."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.mse_loss(forward(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    chosen = _compile(step, fullgraph=True) if compiles else step
    for number, (x, y) in enumerate(batches(end, rank, ranks)):
        if number >= start:
            chosen(x, y)


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    found, others = get_state_dict(model, optimizer)
    return {"model": found, "optimizer": others}


def saved(rank: int, folder: str, place: str) -> Any:
    """Train two steps and write a checkpoint; the keys of what is in it."""
    from torch.distributed import checkpoint

    ranks = torch.distributed.get_world_size()
    model, forward, optimizer = prepared(place, ranks)
    train(forward, optimizer, 0, 2, rank, ranks, place == "step")
    state = states(model, optimizer)
    checkpoint.save(state, checkpoint_id=folder)
    return sorted(state["model"]), sorted(state["optimizer"]["state"]), list(model.state_dict())


def resumed(rank: int, folder: str, place: str) -> Any:
    """Read a checkpoint and train two steps more: the parameters that were read, and those in the end."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    ranks = torch.distributed.get_world_size()
    model, forward, optimizer = prepared(place, ranks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    state = states(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    read = whole(model.state_dict().values())
    train(forward, optimizer, 2, 4, rank, ranks, place == "step")
    return read, whole(model.state_dict().values())


def alone(end: int) -> list[torch.Tensor]:
    model, forward, optimizer = prepared("alone", 1)
    train(forward, optimizer, 0, end, 0, 1)
    return whole(model.state_dict().values())


def check(wrote: list[Any], read: list[Any]) -> None:
    """Keys as of the plain model, all ranks with what was written, and in the end what one process has, up to rounding."""
    names = list(Model().state_dict())
    assert all(found == (sorted(names), sorted(names), names) for found in wrote)
    for start, end in read:
        for values, count in ((start, 2), (end, 4)):
            for value, wanted in zip(values, alone(count), strict=True):
                torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(value, first) for value, first in zip(start, read[0][0], strict=True))


@pytest.mark.slow
def test_from_two_ranks_to_one(tmp_path: Path) -> None:
    check(run(saved, 2, str(tmp_path), "blocks"), run(resumed, 1, str(tmp_path), "whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "blocks"), (4, "blocks")),
        ((4, "blocks"), (2, "eager")),
        ((1, "whole"), (2, "blocks")),
        ((2, "eager"), (1, "blocks")),
        ((2, "step"), (1, "step")),
        ((4, "step"), (2, "step")),
        ((2, "step"), (4, "blocks")),
    ],
)
def test_from_some_ranks_to_others(tmp_path: Path, before: tuple[int, str], after: tuple[int, str]) -> None:
    wrote = run(saved, before[0], str(tmp_path), before[1], seconds=120.0)
    check(wrote, run(resumed, after[0], str(tmp_path), after[1], seconds=120.0))


@pytest.mark.slow
def test_copies_on_all_ranks(tmp_path: Path) -> None:
    check(run(saved, 2, str(tmp_path), "copies"), run(resumed, 4, str(tmp_path), "copies", seconds=120.0))


def dies_while_writing(rank: int, folder: str) -> None:
    """A first checkpoint is whole; while the second is written, a rank dies."""
    from torch.distributed import checkpoint

    saved(rank, f"{folder}/first", "blocks")
    model, forward, optimizer = prepared("blocks", 2)
    train(forward, optimizer, 0, 3, rank, 2)

    class Dying(checkpoint.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if rank == 1:
                os._exit(3)
            return super().write_data(plan, planner)

    checkpoint.save(states(model, optimizer), storage_writer=Dying(f"{folder}/second"))


@pytest.mark.slow
def test_a_rank_that_dies_while_it_writes(tmp_path: Path) -> None:
    (kind, text), (_, code) = outcomes_of(dies_while_writing, 2, str(tmp_path))
    assert (kind, code) == ("raised", 3)
    # What names the parts is written last.
    assert (tmp_path / "first" / ".metadata").exists() and not (tmp_path / "second" / ".metadata").exists()
    read = run(resumed, 2, str(tmp_path / "first"), "blocks")
    for value, wanted in zip(read[0][1], alone(4), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)
