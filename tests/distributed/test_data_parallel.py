"""Data-parallel training by a pass: the same weights as one process that sees the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.distributed import data_parallel
from tests.distributed.models import OPTIMIZERS, batches, build, make_step, trained_alone, weights
from tests.distributed.world import run

SMALL = 64 / 2**20


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def train(rank: int, size: int, name: str, optimizer: str, whole: bool, bucket: float, backend: str = "aten") -> Any:
    model = build(name, rank)
    torch.manual_seed(7)
    rule = OPTIMIZERS[optimizer](model.parameters())
    if whole:
        step = data_parallel(make_step(model, rule), backend=backend, bucket_megabytes=bucket)
    else:
        compiled = data_parallel(model, backend=backend, bucket_megabytes=bucket)
        step = make_step(compiled, rule)
    for x, y in batches(4, rank, size):
        step(x, y)
    return weights(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "optimizer", "whole"),
    [("computed again", "adamw", True), ("tied", "sgd", True), ("tied", "adamw", False)],
    ids=["step with AdamW and a checkpoint", "step", "model"],
)
def test_weights_are_those_of_one_process(name: str, optimizer: str, whole: bool) -> None:
    first, second = run(train, 2, 2, name, optimizer, whole, SMALL)
    close(first, trained_alone(name, optimizer))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_four_processes() -> None:
    found = run(train, 4, 4, "deep", "sgd", True, SMALL)
    close(found[0], trained_alone("deep", "sgd"))
    assert all(torch.equal(found[0][key], other[key]) for other in found for key in other)
