"""The cut of a network: as cheap as the cheapest of all, and of those the one nearest to the sink."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from dovetail.errors import GraphInvalidError
from dovetail.passes.minimum_cut import _behind_the_cut, minimum_cut

Edges = dict[tuple[Any, Any], float]


def random_network(seed: int) -> Edges:
    """Values as edges from ``(n, "in")`` to ``(n, "out")``; some edges have no capacity that could be reached."""
    chance = random.Random(seed)
    edges: Edges = {}
    for number in range(5):
        edges[(number, "in"), (number, "out")] = math.inf if chance.random() < 0.1 else chance.randint(1, 5)
        if number == 0 or chance.random() < 0.3:
            edges["source", (number, "in")] = math.inf
        else:
            for earlier in {chance.randrange(number) for _ in range(2)}:
                edges[(earlier, "out"), (number, "in")] = math.inf
        if number == 4 or chance.random() < 0.3:
            edges[(number, "out"), "sink"] = math.inf
    return edges


def network_of(edges: Edges) -> dict[Any, dict[Any, float]]:
    left: dict[Any, dict[Any, float]] = {}
    for (start, end), capacity in edges.items():
        left.setdefault(start, {})[end] = capacity
        left.setdefault(end, {}).setdefault(start, 0)
    return left


def weight(edges: Edges, behind: set[Any]) -> float:
    return sum(capacity for (start, end), capacity in edges.items() if start not in behind and end in behind)


@pytest.mark.parametrize("seed", range(8))
def test_the_cut_is_the_cheapest_and_the_nearest_to_the_sink(seed: int) -> None:
    edges = random_network(seed)
    points = sorted({point for edge in edges for point in edge} - {"source", "sink"}, key=str)
    sets = [{"sink", *chosen} for size in range(len(points) + 1) for chosen in itertools.combinations(points, size)]
    least = min(weight(edges, behind) for behind in sets)
    if least == math.inf:
        with pytest.raises(GraphInvalidError, match="tuple"):
            _behind_the_cut(network_of(edges))
        return
    found = set(_behind_the_cut(network_of(edges)))
    assert weight(edges, found) == least
    assert all(found <= behind for behind in sets if weight(edges, behind) == least)


def test_a_long_chain_of_values_that_are_all_read() -> None:
    """Each link is nearer to the source than what it leads to: no recursion, and few phases."""
    count = 3000
    edges: Edges = {("source", (0, "in")): math.inf}
    for number in range(count):
        edges[(number, "in"), (number, "out")] = 2 + number % 7
        edges[(number, "out"), "sink"] = math.inf
        if number:
            edges[(number - 1, "out"), (number, "in")] = math.inf
    assert weight(edges, set(_behind_the_cut(network_of(edges)))) == 2


def test_a_constant_is_computed_again_and_not_saved() -> None:
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    zeros = graph.call_function(torch.ops.aten.full.default, ([64, 64], 0.0))
    one = graph.call_function(torch.ops.aten.scalar_tensor.default, (1.0,))
    product = graph.call_function(torch.ops.aten.mm.default, (given, zeros))
    for node, shape in ((given, (64, 64)), (zeros, (64, 64)), (one, ()), (product, (64, 64))):
        node.meta["val"] = torch.empty(shape, device="meta")
    assert minimum_cut([zeros, one]) == []
    assert set(minimum_cut([zeros, one, product])) == {product}
    # What only moves a constant's values is one too.
    moved = graph.call_function(torch.ops.aten.expand.default, (one, [64, 64]))
    moved.meta["val"] = torch.empty(64, 64, device="meta")
    assert minimum_cut([moved]) == []
