"""Which arithmetic of symbolic sizes a trace records."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from dovetail.trace.modes import Tracer
from tests.differential import check_calls, leaf

CALLS = [(leaf(5, 3),), (leaf(7, 6),)]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The targets of all nodes, also of those that no graph keeps."""
    found: list[Any] = []
    create = Tracer.create_node

    def create_node(self: Tracer, *args: Any, **kwargs: Any) -> torch.fx.Node:
        found.append(args[1])
        return create(self, *args, **kwargs)

    monkeypatch.setattr(Tracer, "create_node", create_node)
    return found


@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x * 2).relu().sum(),
        lambda x: torch.nn.functional.layer_norm(x.t() @ x, (x.shape[1],)).sum(0),
        lambda x: (torch.cat([x, x]).exp(), x.sin().t()),
    ],
    ids=["one by one", "a norm", "one size of another"],
)
def test_what_torch_asks_of_sizes_is_not_recorded(program: Any, recorded: list[Any]) -> None:
    """Torch works out by comparisons whether a fake tensor is contiguous."""
    check_calls(program, CALLS, dynamic=True)
    assert not {operator.eq, operator.ge} & set(recorded)


def test_what_the_program_reads_is_recorded(recorded: list[Any]) -> None:
    check_calls(lambda x: x.sum() * (x.shape[0] * 3 + x.shape[1]), CALLS, entries=1, dynamic=True)
    assert {operator.add, operator.mul} <= set(recorded)
