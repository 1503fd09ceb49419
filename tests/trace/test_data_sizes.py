"""Sizes that only the data decides, in one graph where the operators allow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


def masked(x: Any, y: Any) -> Any:
    mask = x > 0
    return (x[mask] * 2 * y[mask]).sum() * y.mean()


def positions(x: Any, y: Any) -> Any:
    found = (x > 0).nonzero().squeeze(-1)
    return y[found] * x.index_select(0, found)


def selected(x: Any, y: Any) -> Any:
    return torch.masked_select(x, y > 0) * 2, (y > 0).nonzero()


def item_as_a_size(x: Any, y: Any) -> Any:
    count = (x > 0).sum().item()
    return torch.zeros(count) + 1, x[:count] * 2


def item_as_a_factor(x: Any, y: Any) -> Any:
    return x * (x > 0).sum().item(), y * x.max().item()


def item_that_is_returned(x: Any, y: Any) -> Any:
    return (x > 0).sum().item(), x * 2, {"largest": x.detach().max().item()}


def two_sizes(x: Any, y: Any) -> Any:
    left, right = x[x > 0], y[y > 0]
    return torch.cat([left, right]).softmax(0), left.mean()


def experts(x: Any, y: Any) -> Any:
    out = torch.zeros_like(x)
    for expert in range(3):
        chosen = torch.where((x * 3).round().abs() % 3 == expert)[0]
        out.index_add_(0, chosen, y[chosen] * (expert + 1))
    return out


def written_at_a_mask(x: Any, y: Any) -> Any:
    mask = x > 0
    x = x * 2
    x[mask] = y[mask] * 3
    return x


def split_at_an_item(x: Any, y: Any) -> Any:
    count = (x > 0).sum().item()
    left, right = x.split([count, x.shape[0] - count])
    return left * 2, right * 3


ONE_GRAPH = [
    masked,
    positions,
    selected,
    item_as_a_size,
    item_as_a_factor,
    item_that_is_returned,
    two_sizes,
    experts,
    written_at_a_mask,
    split_at_an_item,
]


def added(x: Any, y: Any) -> Any:
    return x[x > 0] + y[y > 0]


def branched(x: Any, y: Any) -> Any:
    found = (x > 0).nonzero()
    return x * 0 if found.shape[0] == 0 else x[found[:, 0]]


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    x, y = torch.randn(10), torch.randn(10)
    if seed == 3:
        x = -x.abs()
    if seed == 4:
        x = x.abs()
    return x.requires_grad_(), y.requires_grad_()


def outcome(function: Callable[..., Any], seed: int) -> list[Any]:
    x, y = inputs(seed)
    try:
        result = function(x, y)
    except RuntimeError as error:
        return [type(error)]
    parts = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, torch.Tensor)]
    loss: Any = sum(part.sum() for part in parts if part.requires_grad)
    return [result, *torch.autograd.grad(loss, [x, y], allow_unused=True)]


@pytest.mark.parametrize("function", ONE_GRAPH, ids=lambda function: function.__name__)
@pytest.mark.sampled(4)
def test_one_graph(function: Callable[..., Any]) -> None:
    compiled: Any = dovetail.compile(function, backend="aten", fullgraph=True)
    for seed in range(5):
        same(outcome(compiled, seed), outcome(function, seed))
    assert len(compiled.entries) == 1


@pytest.mark.parametrize("function", [item_as_a_factor, positions, experts], ids=lambda function: function.__name__)
@pytest.mark.sampled(3)
def test_one_graph_by_inductor(function: Callable[..., Any]) -> None:
    compiled: Any = dovetail.compile(function, backend="inductor", fullgraph=True)
    for seed in range(5):
        same(outcome(compiled, seed), outcome(function, seed), exact=False)
    assert len(compiled.entries) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aten", "eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [added, branched], ids=lambda function: function.__name__)
def test_what_one_graph_cannot_hold(function: Callable[..., Any], backend: str) -> None:
    compiled: Any = dovetail.compile(function, backend=backend)
    for seed in range(5):
        same(outcome(compiled, seed), outcome(function, seed))


def test_an_assumption_that_does_not_hold_runs_the_call_eagerly() -> None:
    random = torch.nn.Dropout(0.5)
    log: list[int] = []

    def function(x: Any, y: Any) -> Any:
        log.append(1)
        return random(y) * 2, x[x > 0] + y[y > 0]

    compiled: Any = dovetail.compile(function, backend="aten", fullgraph=True)
    x = torch.tensor([1.0, 2.0, -1.0])
    for y in (torch.tensor([3.0, -1.0, 4.0]), torch.tensor([3.0, -1.0, -4.0])):
        # The second time one element is added to each of the others, which the graph does not do.
        results = []
        for run in (function, compiled):
            torch.manual_seed(0)
            results.append((run(x, y), torch.get_rng_state(), len(log)))
        (expected, state, count), (actual, state_after, count_after) = results
        same(actual, expected)
        assert torch.equal(state, state_after)
        assert count_after == count + 1
    assert len(compiled.entries) == 1


def test_the_graph_shows_what_it_assumes() -> None:
    compiled: Any = dovetail.compile(added, backend="aten", fullgraph=True)
    x = torch.tensor([1.0, 2.0])
    same(compiled(x, x), added(x, x))
    assert "_assert_scalar" in str(compiled.entries[0].compiled.joint)


def test_the_next_entry_begins_with_what_the_last_one_needed() -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2

    compiled = dovetail.compile(positive, backend="aten", fullgraph=True)
    captures = []
    for dtype in (torch.float32, torch.float64, torch.float16):
        x = torch.randn(7, generator=torch.Generator().manual_seed(0)).to(dtype)
        same(positive(x), compiled(x))
        captures.append(compiled.events.count("capture"))
    # The first one tries without such sizes.
    assert captures == [2, 3, 4]
    assert len(compiled.entries) == 3
