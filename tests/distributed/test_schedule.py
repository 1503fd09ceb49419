"""Where in a graph exchanges begin and end, and the passes by themselves. One process is enough to see that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.distributed import ShardingOptions, data_parallel, exchange_shards, replicate, shard, team
from dovetail.distributed import plan as plans
from dovetail.distributed.plan import Plan
from dovetail.reports.explanation import compiled_function
from tests.distributed import world
from tests.distributed.models import OPTIMIZERS, batches, build, make_step

pytestmark = pytest.mark.usefixtures("alone")
collectives = torch.ops._c10d_functional


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    """A process group of this process only."""
    world.init(0, 1, str(tmp_path))
    yield
    torch.distributed.destroy_process_group()


def places(graph: torch.fx.Graph, target: Any) -> list[int]:
    return [place for place, node in enumerate(graph.nodes) if node.target is target]


def waits_of(graph: torch.fx.Graph, target: Any) -> list[tuple[int, int]]:
    """Begin and end of each exchange of a kind, of floating point numbers."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    return [
        (order[node], order[next(iter(node.users))])
        for node in graph.nodes
        if node.target is target and node.meta["val"].is_floating_point()
    ]


def wide() -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(6)])


def graph_of_step(model: nn.Module, **options: Any) -> torch.fx.Graph:
    step = make_step(model, OPTIMIZERS["sgd"](model.parameters()), clip=False)
    compiled: Any = dovetail.compile(step, **options) if "fullgraph" in options else data_parallel(step, **options)
    x, _ = next(batches(1))
    compiled(x, x)
    return compiled_function(compiled).entries[0].compiled.joint.graph  # type: ignore[no-any-return]


def test_gradients_are_exchanged_while_others_are_computed() -> None:
    graph = graph_of_step(wide(), backend="aten", bucket_megabytes=130 / 2**20)
    found = waits_of(graph, collectives.all_reduce.default)
    products = places(graph, torch.ops.aten.mm.default)
    assert len(found) == 3
    # The first two buckets begin before the last product of the backward, and end behind it.
    assert all(begin < products[-1] < end for begin, end in found[:2])
    assert all(end > products[-1] for _, end in found)


def test_without_check_there_are_the_gradients_only() -> None:
    graph = graph_of_step(wide(), backend="aten", check=False)
    assert len(places(graph, collectives.all_reduce.default)) == 1


@pytest.mark.parametrize("again", [True, False])
def test_parameters_are_gathered_ahead_of_their_use(again: bool) -> None:
    options = ShardingOptions(bucket_bytes=130, gather_again=again)
    graph = graph_of_step(shard(wide()), backend="aten", fullgraph=True, passes=(exchange_shards(options),))
    gathered = waits_of(graph, collectives.all_gather_into_tensor.default)
    # Three buckets of two layers; those of the first two are gathered again in the backward.
    assert len(gathered) == (5 if again else 3)
    products = places(graph, torch.ops.aten.mm.default)
    for number, (begin, end) in enumerate(gathered[:3]):
        used = [place for place in products if place > end][0]
        assert begin < (products[2 * (number - 1)] if number else products[0]) <= used
    scattered = waits_of(graph, collectives.reduce_scatter_tensor.default)
    assert len(scattered) == 3 and scattered[0][0] < products[-1] < scattered[0][1]


def test_the_pass_by_itself() -> None:
    model = build("deep")
    x, y = next(batches(1))
    joint = dovetail.capture(model, (x,)).apply(replicate(team()))
    assert "reduce_gradients" in str(joint.provenance[-1])
    nn.functional.mse_loss(joint.compile("aten")(x), y).backward()
    found = [parameter.grad for parameter in model.parameters()]
    wanted = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_explain_and_events_see_through() -> None:
    x, _ = next(batches(1))
    for compiled in (data_parallel(build("deep"), backend="aten"), data_parallel(lambda x: x * 2, backend="aten")):
        compiled(x)
        assert "hit" in str(dovetail.explain(compiled)(x))
        assert dovetail.events_of(compiled).events


def test_plans_are_kept_for_messages_and_not_for_ever() -> None:
    first = plans.register(Plan("step", ("all_reduce first",)))
    for number in range(plans._MOST_PLANS):
        last = plans.register(Plan("step", (f"all_reduce {number}",)))
    assert first not in plans._plans
    assert str(plans._plans[last]).endswith(f"all_reduce {number}")
