"""How the ``cudagraphs`` backend looks at a graph: what it writes to, what cannot be recorded, where it is cut."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dovetail.backends.common.memory import is_dense, memory_of, span
from dovetail.backends.cudagraphs import SimulatedRecorder
from dovetail.backends.cudagraphs.obstacles import find_obstacle
from dovetail.backends.cudagraphs.pieces import cut, run_pieces
from dovetail.passes.mutations import mutated_inputs
from dovetail.whole_calls.operator import RANDOM_WHOLE_CALL, WHOLE_CALL

aten = torch.ops.aten


def graph_of(build: Callable[[torch.fx.Graph], Any], inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """A graph that is built node by node and then run once, so that every node has a value."""
    graph = torch.fx.Graph()
    build(graph)
    module = torch.fx.GraphModule({}, graph)

    class Note(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            n.meta["val"] = super().run_node(n)
            return n.meta["val"]

    Note(module).run(*inputs)
    return module


def two(graph: torch.fx.Graph) -> tuple[torch.fx.Node, torch.fx.Node]:
    return graph.placeholder("x"), graph.placeholder("y")


def write_by_list(graph: torch.fx.Graph) -> None:
    x, y = two(graph)
    graph.call_function(aten._foreach_mul_.Scalar, ([y], 2.0))
    graph.output([x])


def write_through_view(graph: torch.fx.Graph) -> None:
    x, y = two(graph)
    row = graph.call_function(aten.select.int, (graph.call_function(aten.t.default, (x,)), 0, 0))
    graph.call_function(aten.add_.Tensor, (row, 1))
    graph.output([y])


def write_through_split(graph: torch.fx.Graph) -> None:
    x, y = two(graph)
    pieces = graph.call_function(aten.split.Tensor, (y, 1))
    graph.call_function(aten.zero_.default, (graph.call_function(operator.getitem, (pieces, 1)),))
    graph.output([x])


def write_by_keyword(graph: torch.fx.Graph) -> None:
    x, y = two(graph)
    graph.call_function(aten.mul.out, (x, x), {"out": y})
    graph.output([x])


def write_through_reshape(graph: torch.fx.Graph) -> None:
    """Whether a reshape is a view is not in its schema."""
    x, y = two(graph)
    graph.call_function(aten.zero_.default, (graph.call_function(aten.reshape.default, (x, [-1])),))
    graph.output([y])


def write_by_the_unknown(graph: torch.fx.Graph) -> None:
    x, y = two(graph)
    graph.call_function(len, (graph.call_function(aten.t.default, (y,)),))
    graph.output([x])


def write_to_own_memory(graph: torch.fx.Graph) -> None:
    x, _ = two(graph)
    own = graph.call_function(aten.clone.default, (x,))
    graph.call_function(aten.zero_.default, (own,))
    graph.output([own])


def write_to_the_result_of_a_write(graph: torch.fx.Graph) -> None:
    x, y = two(graph)
    same = graph.call_function(aten.copy_.default, (x, y))
    graph.call_function(aten.zero_.default, (same,))
    graph.output([y])


@pytest.mark.parametrize(
    ("build", "written"),
    [
        (write_by_list, {1}),
        (write_through_view, {0}),
        (write_through_split, {1}),
        (write_by_keyword, {1}),
        (write_through_reshape, {0}),
        (write_by_the_unknown, {1}),
        (write_to_own_memory, set()),
        (write_to_the_result_of_a_write, {0}),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_written_inputs(build: Callable[[torch.fx.Graph], Any], written: set[int]) -> None:
    assert mutated_inputs(graph_of(build, [torch.ones(2, 2), torch.ones(2, 2)])) == written


def test_inputs_that_share_memory_are_written_together() -> None:
    base = torch.ones(4, 2)
    assert mutated_inputs(graph_of(write_by_list, [base[:2], base[2:]])) == {0, 1}


def test_without_values_schemas_still_tell() -> None:
    graph = torch.fx.Graph()
    write_through_view(graph)
    assert mutated_inputs(torch.fx.GraphModule({}, graph)) == {0}


# --- cutting ----------------------------------------------------------------------------------------------------------


def on_host(node: torch.fx.Node) -> bool:
    return any(value.meta["val"].dtype == torch.float64 for value in (node, *node.all_input_nodes))


def zigzag(graph: torch.fx.Graph) -> None:
    """Two chains, each with a detour to the host, written one after the other."""
    results = []
    for value in two(graph):
        device = graph.call_function(aten.exp.default, (value,))
        host = graph.call_function(aten._to_copy.default, (device,), {"dtype": torch.float64})
        host = graph.call_function(aten.mul.Tensor, (host, 2))
        back = graph.call_function(aten._to_copy.default, (host,), {"dtype": torch.float32})
        results.append(graph.call_function(aten.sin.default, (back,)))
    graph.output([*results, None, 3])


def test_detours_to_the_host_are_made_together() -> None:
    inputs = [torch.randn(3), torch.randn(3)]
    module = graph_of(zigzag, inputs)
    pieces = cut(module, lambda node: not on_host(node))
    assert [piece.is_recordable for piece in pieces] == [True, False, True]
    run = run_pieces(module, pieces, [lambda values, piece=piece: list(piece.graph(*values)) for piece in pieces])
    outputs = run(list(inputs))
    for output, value in zip(outputs, inputs):
        assert torch.equal(output, (value.exp().double() * 2).float().sin())
    assert outputs[2:] == [None, 3]


def test_random_operators_keep_their_order() -> None:
    def build(graph: torch.fx.Graph) -> None:
        x, y = two(graph)
        first = graph.call_function(aten.rand_like.default, (x,))
        host = graph.call_function(aten.rand_like.default, (y,), {"dtype": torch.float64})
        third = graph.call_function(aten.rand_like.default, (x,))
        graph.output([first, host, third])

    inputs = [torch.ones(3), torch.ones(3)]
    module = graph_of(build, inputs)
    pieces = cut(module, lambda node: not on_host(node))
    assert len(pieces) == 3
    run = run_pieces(module, pieces, [lambda values, piece=piece: list(piece.graph(*values)) for piece in pieces])
    torch.manual_seed(0)
    wanted = module(*inputs)
    torch.manual_seed(0)
    assert all(map(torch.equal, wanted, run(list(inputs))))


def test_a_graph_that_writes_keeps_its_order() -> None:
    def build(graph: torch.fx.Graph) -> None:
        x, y = two(graph)
        before = graph.call_function(aten.sin.default, (x,))
        host = graph.call_function(aten._to_copy.default, (y,), {"dtype": torch.float64})
        graph.call_function(aten.add_.Tensor, (x, 1))
        after = graph.call_function(aten.sin.default, (x,))
        graph.output([before, host, after])

    inputs = [torch.ones(3), torch.ones(3)]
    module = graph_of(build, inputs)
    pieces = cut(module, lambda node: not on_host(node))
    run = run_pieces(module, pieces, [lambda values, piece=piece: list(piece.graph(*values)) for piece in pieces])
    x = torch.ones(3)
    before, _, after = run([x, torch.ones(3)])
    assert torch.equal(before, torch.ones(3).sin())
    assert torch.equal(after, torch.full((3,), 2.0).sin())
    assert torch.equal(x, torch.full((3,), 2.0))


def test_a_piece_without_kernels_is_not_recorded() -> None:
    def build(graph: torch.fx.Graph) -> None:
        x, y = two(graph)
        graph.output([graph.call_function(aten.t.default, (x,)), y])

    module = graph_of(build, [torch.ones(2, 2), torch.ones(2)])
    assert [piece.is_recordable for piece in cut(module, lambda node: True)] == [False]


def test_values_are_freed_after_their_last_use() -> None:
    import weakref

    module = graph_of(zigzag, [torch.randn(3), torch.randn(3)])
    pieces = cut(module, lambda node: not on_host(node))
    inputs = [torch.randn(3), torch.randn(3)]
    seen = [weakref.ref(value) for value in inputs]
    alive: list[bool] = []

    def last(values: list[Any]) -> list[Any]:
        alive.extend(item() is not None for item in seen)
        return list(pieces[2].graph(*values))

    runs = [lambda values, piece=piece: list(piece.graph(*values)) for piece in pieces[:2]]
    run_pieces(module, pieces, [*runs, last])(inputs)
    assert alive == [False, False]


# --- obstacles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "extra", "word"),
    [
        (aten.nonzero.default, (), "waits"),
        (aten.masked_select.default, (torch.tensor([True, False, True]),), "waits"),
        (aten.index.Tensor, ([torch.tensor([True, False, True])],), "waits"),
        (aten.index.Tensor, ([torch.tensor([0, 2])],), ""),
        (aten._to_copy.default, (), ""),
        (aten.sin.default, (), ""),
        (aten.linalg_cholesky.default, (), "waits"),
    ],
)
def test_obstacles(target: Any, extra: tuple[Any, ...], word: str) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.eye(3) if target is aten.linalg_cholesky.default else torch.ones(3)

    def constant(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("constant")
        node.meta["val"] = value
        return node

    arguments = torch.utils._pytree.tree_map(constant, extra)
    node = graph.call_function(target, (x, *arguments))
    node.meta["val"] = target(x.meta["val"], *extra)
    found = find_obstacle(node, SimulatedRecorder(), torch.device("cpu"))
    assert (word in str(found)) if word else found is None


@pytest.mark.parametrize("target", [WHOLE_CALL, RANDOM_WHOLE_CALL])
def test_whole_calls_are_obstacles(target: Any) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    node = graph.call_function(target, (0, [x]))
    node.meta["val"] = [torch.ones(3)]
    assert "as a whole" in str(find_obstacle(node, SimulatedRecorder(), torch.device("cpu")))


def test_an_own_generator_and_another_device_are_obstacles() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    node = graph.call_function(aten.rand.generator, ([3],), {"generator": torch.Generator()})
    node.meta["val"] = torch.ones(3)
    assert "generator of its own" in str(find_obstacle(node, SimulatedRecorder(), torch.device("cpu")))
    other = graph.call_function(aten.sin.default, (x,))
    other.meta["val"] = torch.ones(3)
    assert "recording is made on meta" in str(find_obstacle(other, SimulatedRecorder(), torch.device("meta")))


def test_memory_of_a_strided_tensor() -> None:
    base = torch.arange(12.0).view(3, 4)
    assert is_dense(base) and is_dense(base.t()) and is_dense(base[:2])
    assert not is_dense(base[:, :2]) and not is_dense(base[0].expand(2, 4))
    assert span(base[:, 1:3]) == 10 and torch.equal(memory_of(base[:, 1:3]), torch.arange(1.0, 11.0))
    assert span(torch.empty(0, 3)) == 0
