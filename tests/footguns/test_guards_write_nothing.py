"""Checking guards leaves the user's objects as they are: no ``__missing__`` runs, which for a ``defaultdict`` adds the key."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

import dovetail


class Counting(dict[str, Any]):
    """A dictionary that counts how often it was asked for what it does not hold."""

    asked = 0

    def __missing__(self, key: str) -> float:
        type(self).asked += 1
        return 2.0


def test_an_optimizer_of_another_kind_gets_no_state() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    holder: dict[str, torch.optim.Optimizer] = {"optimizer": torch.optim.AdamW([weight])}

    def step(x: torch.Tensor) -> torch.Tensor:
        holder["optimizer"].zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        holder["optimizer"].step()
        return loss.detach()

    compiled = dovetail.compile(step, backend="aten", fullgraph=True)
    for _ in range(3):
        compiled(torch.ones(2))
    holder["optimizer"] = torch.optim.SGD([weight], lr=0.1)
    compiled(torch.ones(2))
    assert len(holder["optimizer"].state) == 0


@pytest.mark.parametrize("explains", [False, True])
def test_a_missing_key_is_not_made_by_a_guard(explains: bool) -> None:
    def look_up(x: torch.Tensor, table: Any) -> Any:
        return x * table["scale"][0]

    compiled = dovetail.compile(look_up, backend="aten", fullgraph=True)
    full = collections.defaultdict(lambda: [3.0], scale=[2.0])
    compiled(torch.ones(2), full)
    empty: Any = collections.defaultdict(lambda: [3.0])
    if explains:
        assert "miss" in str(dovetail.explain(compiled)(torch.ones(2), empty))
        assert dict(empty) == {}
    assert torch.equal(compiled(torch.ones(2), empty), torch.full((2,), 3.0))
    assert dict(empty) == {"scale": [3.0]}


def test_code_of_the_user_runs_once() -> None:
    def look_up(x: torch.Tensor, table: Any) -> Any:
        return x * table["scale"]

    compiled = dovetail.compile(look_up, backend="aten")
    compiled(torch.ones(2), Counting(scale=1.0))
    Counting.asked = 0
    # As often in a capture that is rolled back and run again by eager: at the first call it may be two.
    compiled(torch.ones(2), Counting())
    Counting.asked = 0
    assert torch.equal(compiled(torch.ones(2), Counting(scale=4.0)), torch.full((2,), 4.0))
    assert Counting.asked == 0
