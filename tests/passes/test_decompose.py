"""Decomposing a flat graph keeps names, meta, strides and None."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail.backends.aten import compile_aten
from dovetail.backends.inductor.decompositions import wanted_decompositions
from dovetail.backends.protocol import Backend
from dovetail.errors import GraphInvalidError
from dovetail.passes.decompose import clean_views, decompose_graph
from tests.backends.graphs import make_graph, mlp, mlp_inputs


def test_values_names_and_meta():
    inputs = mlp_inputs()
    graph, fakes, fake_mode = make_graph(mlp, *inputs)
    for index, node in enumerate(node for node in graph.graph.nodes if node.op == "placeholder"):
        node.meta["desc"] = f"input {index}"
    new = decompose_graph(graph, wanted_decompositions(), fake_mode)
    names = [[node.name for node in g.graph.nodes if node.op == "placeholder"] for g in (graph, new)]
    assert names[0] == names[1]
    assert [n.meta["desc"] for n in new.graph.nodes if n.op == "placeholder"] == ["input 0", "input 1", "input 2"]
    targets = {node.target for node in new.graph.nodes}
    assert torch.ops.aten.native_layer_norm.default not in targets
    assert torch.ops.aten._softmax.default not in targets
    for node in new.graph.nodes:
        if node.op == "call_function":
            assert node.meta["phase"] == "forward"
            assert node.meta["user_line"].line == 7
            assert "val" in node.meta
    for got, want in zip(compile_aten(new)(list(inputs)), mlp(*inputs), strict=True):
        assert (got is None and want is None) or torch.allclose(got, want, atol=1e-5)


def test_empty_table_changes_nothing():
    inputs = mlp_inputs()
    graph, _, fake_mode = make_graph(mlp, *inputs)
    new = decompose_graph(graph, None, fake_mode)
    for got, want in zip(compile_aten(new)(list(inputs)), mlp(*inputs), strict=True):
        assert (got is None and want is None) or torch.equal(got, want)


def test_phases_of_both_halves():
    graph, _, fake_mode = make_graph(lambda x: [x.softmax(0).softmax(0)], torch.ones(3))
    second = [node for node in graph.graph.nodes if node.op == "call_function"][1]
    second.meta["phase"] = "backward"
    new = decompose_graph(graph, wanted_decompositions(), fake_mode)
    phases = [node.meta["phase"] for node in new.graph.nodes if node.op == "call_function"]
    assert set(phases) == {"forward", "backward"}
    assert phases == sorted(phases, reverse=True)


def test_strides_of_outputs_are_kept():
    def turned(x):
        return torch.empty_strided((2, 3), (1, 2)).copy_(x)

    graph, _, fake_mode = make_graph(lambda x: [x.sin()], torch.empty_strided((2, 3), (1, 2)).fill_(1.0))
    table = {torch.ops.aten.sin.default: lambda x: (x.contiguous() * 1).contiguous()}
    new = decompose_graph(graph, table, fake_mode)
    assert new.graph.output_node().args[0][0].meta["val"].stride() == (1, 2)
    (out,) = compile_aten(new)([turned(torch.ones(2, 3))])
    assert out.stride() == (1, 2)


def test_symbolic_strides_of_outputs_are_kept():
    def laid_out_as_its_input(x, *args):
        return (x - x.mean((0, 2, 3), keepdim=True)) * 1, x.new_ones(x.shape[1]), x.new_ones(x.shape[1])

    table = {torch.ops.aten.native_batch_norm.default: laid_out_as_its_input}
    table[torch.ops.aten._native_batch_norm_legit.no_stats] = laid_out_as_its_input
    backend = Backend("laid out", compile_aten, decompositions=lambda: table)
    compiled = dovetail.compile(
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
        backend=backend,
        dynamic=True,
        fullgraph=True,
    )
    for rows in (2, 5):
        assert compiled(torch.randn(rows, 4, 3, 6).transpose(2, 3)).stride() == (72, 18, 3, 1)
    assert compiled(torch.randn(4, 3, 3, 6).transpose(0, 1)).stride() == (72, 18, 6, 1)


def test_in_place_decomposition_is_refused():
    graph, _, fake_mode = make_graph(lambda x: [x.sin()], torch.ones(3))
    table = {torch.ops.aten.sin.default: lambda x: torch.empty_like(x).copy_(x)}
    with pytest.raises(GraphInvalidError, match="writes in place") as info:
        decompose_graph(graph, table, fake_mode)
    assert info.value.where.line == 7


def test_constants_and_numbers():
    graph, _, fake_mode = make_graph(lambda x: [x + 1], torch.ones(2))
    graph.table = torch.arange(2.0)
    add = next(node for node in graph.graph.nodes if node.op == "call_function")
    with graph.graph.inserting_before(add):
        constant = graph.graph.get_attr("table")
    add.args = (add.args[0], constant)
    graph.graph.output_node().args = ([add, 5, None, constant],)
    new = decompose_graph(graph, wanted_decompositions(), fake_mode)
    outputs = compile_aten(new)([torch.ones(2)])
    assert outputs[0].tolist() == [1.0, 2.0]
    assert outputs[1:3] == [5, None]
    assert outputs[3].tolist() == [0.0, 1.0]


def test_idle_views_and_dead_code_go():
    def idle(x):
        unused = x.exp()
        del unused
        return [x.view(2, 2).view(4).detach().sin(), torch.rand(2)]

    graph, _, fake_mode = make_graph(idle, torch.ones(4))
    new = decompose_graph(graph, None, fake_mode)
    targets = [node.target for node in new.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.exp.default not in targets
    assert torch.ops.aten.detach.default not in targets
    assert torch.ops.aten.rand.default in targets


def test_random_operator_nobody_reads_stays():
    def noisy(x):
        torch.rand(3)
        return [x + 1]

    graph, _, fake_mode = make_graph(noisy, torch.ones(2))
    if not any(node.target is torch.ops.aten.rand.default for node in graph.graph.nodes):
        pytest.skip("make_fx dropped it already")
    new = decompose_graph(graph, wanted_decompositions(), fake_mode)
    assert any(node.target is torch.ops.aten.rand.default for node in new.graph.nodes)


def test_returned_view_is_kept():
    graph, _, _ = make_graph(lambda x: [x.detach(), x.sin().detach()], torch.ones(2))
    before = len(graph.graph.nodes)
    clean_views(graph.graph)
    assert len(graph.graph.nodes) == before


def test_constant_made_by_a_decomposition():
    graph, _, fake_mode = make_graph(lambda x: [x.sin()], torch.ones(2))
    table = {torch.ops.aten.sin.default: lambda x: x + torch.tensor([2.0, 3.0])}
    new = decompose_graph(graph, table, fake_mode)
    (out,) = compile_aten(new)([torch.ones(2)])
    assert out.tolist() == [3.0, 4.0]


def test_graph_without_a_list_is_refused():
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    with pytest.raises(GraphInvalidError, match="flat list"):
        decompose_graph(torch.fx.GraphModule({}, graph), None, make_graph(lambda x: [x], torch.ones(1))[2])


@pytest.mark.parametrize(
    "read",
    [lambda x: x.view(-1), lambda x: x.as_strided((3, 2), (2, 1), 1), lambda x: x.view(torch.int32)],
    ids=["view", "as_strided", "view as another type"],
)
def test_views_find_the_strides_that_they_were_recorded_for(read):
    def other_layout(x):
        return (x.t().contiguous() * 2).t()

    x = torch.arange(12.0).view(3, 4)
    graph, _, fake_mode = make_graph(lambda x: [read(x.neg())], x)
    new = decompose_graph(graph, {torch.ops.aten.neg.default: other_layout}, fake_mode)
    (found,) = compile_aten(new)([x])
    assert torch.equal(found, read(x * 2))
