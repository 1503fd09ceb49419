"""A rank that leaves the graph of a step alone, with modules whose exchanges in eager are others than those of a graph."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dovetail
from dovetail.errors import RanksDifferError
from tests.distributed.models import batches
from tests.distributed.test_fully_sharded import same, whole
from tests.distributed.world import run


def prepared(way: str) -> tuple[nn.Module, Any]:
    """A model, and what torch has made of it."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6) if way == "buffers" else nn.LayerNorm(6)
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 2))
    if way == "spread":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
        return model, model
    return model, DistributedDataParallel(model, bucket_cap_mb=1e-4)


def leaves(rank: int, ways: tuple[str, ...], place: str, speakers: tuple[int, ...]) -> Any:
    """What is said, and the parameters, where some ranks break the graph of the third step; eager takes the steps that succeed."""
    said: list[str] = []
    found = []
    for way in ways:
        for compiles in (False, True):
            model, outer = prepared(way)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            def step(x: Any, y: Any, speaks: bool, outer: Any = outer, optimizer: Any = optimizer) -> None:
                hidden = outer(x)
                if speaks and place == "forward":
                    print(end="")
                nn.functional.mse_loss(hidden, y).backward()
                if speaks and place == "backward":
                    print(end="")
                optimizer.step()
                optimizer.zero_grad()

            chosen = dovetail.compile(step, backend="aten") if compiles else step
            for number, (x, y) in enumerate(batches(4, rank, 2)):
                # With FSDP the graph ends in front of the module, whoever speaks behind it: so it stays.
                is_alone = number == 2 or (way == "spread" and number > 2)
                speaks = rank in speakers and number == 2
                if not is_alone or len(speakers) == 2 or place == "backward":
                    chosen(x, y, speaks)
                elif compiles:
                    with pytest.raises(RanksDifferError) as error:
                        chosen(x, y, speaks)
                    said.append(str(error.value))
            found.append(whole(model.state_dict().values()))
    return said, found


def check(ways: tuple[str, ...], place: str, speakers: tuple[int, ...]) -> list[list[str]]:
    """Whether nothing is lost; what the ranks say."""
    texts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for said, found in run(leaves, 2, ways, place, speakers, seconds=200.0):
            for eager, compiled in zip(found[::2], found[1::2], strict=True):
                assert same(compiled, eager)
            texts.append(said)
    return texts


def test_a_rank_that_leaves_the_graph_between_forward_and_backward() -> None:
    first, second = check(("copies", "buffers"), "forward", (0,))
    assert len(first) == len(second) == 2
    for text in first:
        assert "rank 0 has `DistributedDataParallel as in eager, outside of a graph`; rank 1 has `" in text
    for text in second:
        assert "; rank 0 has `DistributedDataParallel as in eager, outside of a graph`" in text


@pytest.mark.slow
def test_ranks_that_all_leave_it_and_one_that_goes_behind_the_backward() -> None:
    assert check(("buffers",), "forward", (0, 1)) == [[], []]
    assert check(("buffers",), "backward", (1,)) == [[], []]


@pytest.mark.slow
def test_a_rank_that_leaves_a_step_of_fsdp() -> None:
    for said in check(("spread",), "forward", (1,)):
        assert len(said) == 2
        assert all("rank 1 has `fully_shard as in eager, outside of a graph`" in text for text in said)
    assert check(("spread",), "forward", (0, 1)) == [[], []]
