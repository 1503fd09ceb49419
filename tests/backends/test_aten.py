"""The reference backend: bitwise eager, below autograd, values freed early."""

from __future__ import annotations

import gc
import math
import traceback
import weakref

import pytest
import torch

import dovetail
from dovetail.backends import ATEN, compile_with
from dovetail.backends.aten import compile_aten, generate_source
from dovetail.errors import BackendError
from dovetail.torch_private import operators as private_operators
from tests.backends.graphs import make_graph, mlp, mlp_inputs


def run(function, *inputs, kind="inference"):
    graph, fakes, _ = make_graph(function, *inputs)
    return compile_with(ATEN, graph, fakes, kind, {})(list(inputs))


@pytest.mark.parametrize("kind", ["forward", "backward", "inference"])
def test_bitwise_equal_to_eager(kind):
    inputs = mlp_inputs()
    outputs = run(mlp, *inputs, kind=kind)
    for got, want in zip(outputs, mlp(*inputs), strict=True):
        assert (got is None and want is None) or torch.equal(got, want)


def test_random_numbers_are_eagers():
    def noisy(x):
        return [torch.nn.functional.dropout(x, 0.5, True), torch.bernoulli(torch.full_like(x, 0.3)), torch.rand_like(x)]

    x = torch.ones(64)
    torch.manual_seed(3)
    want = noisy(x)
    graph, fakes, _ = make_graph(noisy, x)
    compiled = compile_aten(graph, fakes)
    torch.manual_seed(3)
    got = compiled([x])
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_input_list_is_emptied_and_values_are_freed_early():
    seen = []

    def watched(x):
        seen.append(weakref.ref(x))
        return x

    graph, fakes, _ = make_graph(lambda x: [x.exp().sin().cos()], torch.ones(3))
    first, second, third = [node for node in graph.graph.nodes if node.op == "call_function"]
    with graph.graph.inserting_after(first):
        probe = graph.graph.call_function(watched, (first,))
    second.args = (probe,)
    alive = []
    with graph.graph.inserting_after(second):
        late = graph.graph.call_function(lambda x: (gc.collect(), alive.append(seen[0]() is not None), x)[2], (second,))
    third.args = (late,)
    values = [torch.ones(3)]
    compile_aten(graph, fakes)(values)
    assert values == []
    assert alive == [False]


def test_unused_input_is_freed():
    graph, fakes, _ = make_graph(lambda x, y: [x + 1], torch.ones(2), torch.ones(2))
    alive = []
    add = next(node for node in graph.graph.nodes if node.op == "call_function")
    values = [torch.ones(2), torch.ones(2)]
    unused = weakref.ref(values[1])
    with graph.graph.inserting_after(add):
        graph.graph.call_function(lambda x: alive.append(unused() is not None), (add,))
    compile_aten(graph, fakes)(values)
    assert alive == [False]


def test_outputs_are_no_views_and_require_no_gradient():
    x = torch.randn(4, 4, requires_grad=True)

    def views(x):
        return [x.view(16), x.exp().t(), x.split(2)[1], torch.ops.aten.reshape.default(x, [2, 8])]

    with torch.enable_grad():
        outputs = run(views, x, kind="forward")
    for output in outputs:
        assert not output.requires_grad
        assert not output._is_view()


def test_placeholder_output_is_the_input_object():
    inputs = mlp_inputs()
    assert run(mlp, *inputs)[3] is inputs[1]


def test_write_to_a_base_is_noticed_by_a_saved_view():
    graph, fakes, _ = make_graph(lambda x: [x.exp(), x.exp()], torch.ones(4, 4))
    graph, fakes, _ = make_graph(lambda x: (lambda h: [h, h.view(16)])(x.exp()), torch.ones(4, 4))
    compiled = compile_aten(graph, fakes, kind="forward")

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out, saved = compiled([x])
            ctx.save_for_backward(saved)
            return out

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0].view(4, 4) * grad

    out = Exp.apply(torch.ones(4, 4, requires_grad=True))
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_autocast_at_run_time_changes_nothing():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    graph, fakes, _ = make_graph(lambda x, w: [x @ w], x, w)
    with torch.autocast("cpu", torch.bfloat16):
        (got,) = compile_aten(graph, fakes)([x, w])
    assert got.dtype is torch.float32
    assert torch.equal(got, x @ w)


def test_constants_numbers_and_get_attr():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    constant = graph.get_attr("table")
    added = graph.call_function(torch.ops.aten.add.Tensor, (x, constant))
    filled = graph.call_function(torch.ops.aten.full.default, ([2], -math.inf), {"dtype": torch.float64})
    graph.output([added, filled, 3, None, x, constant])
    root = torch.nn.Module()
    root.table = torch.arange(2.0)
    outputs = compile_aten(torch.fx.GraphModule(root, graph))([torch.ones(2)])
    assert outputs[0].tolist() == [1.0, 2.0]
    assert outputs[1].tolist() == [-math.inf, -math.inf]
    assert outputs[1].dtype is torch.float64
    assert outputs[2:4] == [3, None]
    assert outputs[5].tolist() == [0.0, 1.0]


def test_traceback_shows_the_operator_and_the_users_line():
    graph, fakes, _ = make_graph(lambda x, w: [x @ w], torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(RuntimeError) as info:
        compile_aten(graph, fakes)([torch.ones(2, 3), torch.ones(2, 2)])
    text = "".join(traceback.format_exception(info.value))
    assert "# mm at train.py:7" in text


def test_source_is_straight_line():
    graph, _, _ = make_graph(lambda x: [x.exp() + 1], torch.ones(2))
    source, names = generate_source(graph)
    assert "inputs.clear()" in source
    assert private_operators.operator_entry(torch.ops.aten.exp.default) in names.values()


def test_same_operator_is_bound_once():
    graph, _, _ = make_graph(lambda x: [x.exp().exp().exp()], torch.ones(2))
    _, names = generate_source(graph)
    assert sum(name.startswith("exp") for name in names) == 1


def test_graph_without_a_list_is_refused():
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    with pytest.raises(BackendError, match="flat list"):
        compile_aten(torch.fx.GraphModule({}, graph))


def test_depthwise_convolution_is_bitwise_eager():
    x, w = torch.randn(2, 8, 12, 12), torch.randn(8, 1, 3, 3, requires_grad=True)

    def conv(x, w):
        return [torch.nn.functional.conv2d(x, w, padding=1, groups=8)]

    want = conv(x, w)[0]
    assert torch.equal(run(conv, x, w, kind="forward")[0], want)


@pytest.mark.parametrize("name", ["aten", "aot_eager"])
def test_results_of_operators_that_end_with_a_view_can_be_written_to(name):
    table, places = torch.randn(3, 4, requires_grad=True), torch.tensor([[0, 1], [1, 0]])
    for program in (lambda p, t: torch.nn.functional.embedding(p, t), lambda p, t: torch.stack([t, t])):
        compiled = dovetail.compile(program, backend=name)
        for _ in range(2):
            result = compiled(places, table)
            result.mul_(2)
            (gradient,) = torch.autograd.grad(result.sum(), table)
            wanted = program(places, table).mul_(2)
            assert torch.equal(result, wanted)
            assert torch.equal(gradient, torch.autograd.grad(wanted.sum(), table)[0])
