"""Inductor behind the protocol: tolerance, strides, random numbers, version counters."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail.backends import INDUCTOR, compile_with
from dovetail.backends.inductor.decompositions import wanted_decompositions
from dovetail.errors import BackendError, OptionError
from dovetail.passes.decompose import decompose_graph
from dovetail.torch_private import compilers as private_compilers
from dovetail.torch_private import operators as private_operators
from tests.backends.graphs import make_graph, mlp, mlp_inputs

pytestmark = pytest.mark.skipif(private_compilers.cpp_compiler() is None, reason="needs a C++ compiler")


def compiled(function, *inputs, kind="inference", options=None):
    graph, fakes, fake_mode = make_graph(function, *inputs)
    graph = decompose_graph(graph, INDUCTOR.decompositions(), fake_mode)
    before = str(graph.graph)
    run = compile_with(INDUCTOR, graph, fakes, kind, options or {})
    assert str(graph.graph) == before
    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["forward", "backward", "inference"])
def test_close_to_eager(kind):
    inputs = mlp_inputs()
    inputs[1].requires_grad_()
    run = compiled(mlp, *inputs, kind=kind)
    for _ in range(2):
        values = list(inputs)
        for got, want in zip(run(values), mlp(*inputs), strict=True):
            assert (got is None and want is None) or torch.allclose(got, want, atol=1e-5)


def test_random_numbers_and_their_order_are_eagers():
    def noisy(x, y):
        a = torch.nn.functional.dropout(x, 0.5, True)
        b = torch.rand_like(y)
        c = torch.bernoulli(torch.full_like(x, 0.3))
        d = torch.nn.functional.dropout(y.exp(), 0.2, True)
        return [(a * c).sum(0), b + d, torch.randn_like(x), a]

    x, y = torch.ones(33, 9), torch.ones(700)
    run = compiled(noisy, x, y)
    torch.manual_seed(3)
    want = noisy(x, y)
    torch.manual_seed(3)
    got = run([x, y])
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_visible_outputs_have_the_promised_strides():
    def layouts(x, w):
        return [torch.nn.functional.conv2d(x, w).permute(0, 2, 3, 1).exp(), (x + 1).permute(3, 2, 1, 0), x.sin()]

    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    w = torch.randn(8, 4, 3, 3)
    run = compiled(layouts, x, w)
    for got, want in zip(run([x, w]), layouts(x, w), strict=True):
        assert got.stride() == want.stride()
        assert torch.allclose(got, want, atol=1e-5)


def test_aliases_share_version_counters():
    def aliases(x):
        h = x.exp()
        return [h, h.view(16), x.t()]

    x = torch.randn(4, 4)
    run = compiled(aliases, x, kind="forward")
    for _ in range(2):
        out, saved, transposed = run([x])
        for value in (out, saved, transposed):
            assert not value._is_view()
            assert not value.requires_grad
        before = saved._version
        out.add_(1)
        assert saved._version == before + 1 or saved.data_ptr() != out.data_ptr()
        before = transposed._version
        x.add_(1)
        assert transposed._version == before + 1 or transposed.data_ptr() != x.data_ptr()


def test_autocast_and_grad_mode_at_run_time_change_nothing():
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    run = compiled(lambda x, w: [x @ w], x, w, kind="forward")
    with torch.autocast("cpu", torch.bfloat16):
        (got,) = run([x, w])
    assert got.dtype is torch.float32
    assert torch.allclose(got, x @ w)


def test_unknown_setting():
    graph, fakes, _ = make_graph(lambda x: [x + 1], torch.ones(2))
    with pytest.raises(OptionError, match="no option 'max_autotuned'"):
        compile_with(INDUCTOR, graph, fakes, "forward", {"max_autotuned": True})


def test_graph_without_fake_values():
    graph = torch.fx.Graph()
    graph.output([graph.placeholder("x")])
    with pytest.raises(BackendError, match="fake value"):
        compile_with(INDUCTOR, torch.fx.GraphModule({}, graph), [torch.ones(2)], "forward")


def test_random_operators_are_not_decomposed():
    assert not any(
        isinstance(target, private_operators.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
        for target in wanted_decompositions()
    )


def test_saved_outputs_keep_the_strides_the_backward_expects():
    def saved(x, w):
        h = torch.nn.functional.conv2d(x, w)
        return [h.sum(), h, torch.nn.functional.conv2d(h.relu(), w)]

    x, w = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
    run = compiled(saved, x, w, kind="forward", options={"user_visible_outputs": [0]})
    for got, want in zip(run([x, w]), saved(x, w), strict=True):
        assert got.stride() == want.stride()


def test_numbers_and_none_among_the_outputs():
    graph, fakes, _ = make_graph(lambda x: [x + 1], torch.ones(2))
    add = graph.graph.output_node().args[0][0]
    graph.graph.output_node().args = ([5, None, add, add],)
    outputs = compile_with(INDUCTOR, graph, fakes, "forward")([torch.ones(2)])
    assert outputs[:2] == [5, None]
    assert outputs[2].tolist() == outputs[3].tolist() == [2.0, 2.0]


def test_write_inside_the_graph_is_refused():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    mask = graph.call_function(torch.ops.aten.empty_like.default, (x,))
    graph.output([graph.call_function(torch.ops.aten.bernoulli_.float, (mask,))])
    with pytest.raises(BackendError, match="writes in place with aten.bernoulli_.float"):
        compile_with(INDUCTOR, torch.fx.GraphModule({}, graph), [torch.ones(2)], "forward")


def test_final_write_to_an_input_is_done():
    graph, fakes, _ = make_graph(lambda x: [x + 1], torch.ones(2))
    placeholder, add = list(graph.graph.nodes)[:2]
    with graph.graph.inserting_after(add):
        graph.graph.call_function(torch.ops.aten.copy_.default, (placeholder, add)).meta["val"] = fakes[0]
    x = torch.ones(2)
    compile_with(INDUCTOR, graph, fakes, "inference")([x])
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.arange(5) * 2.0,
        lambda: torch.ones(3) + 1,
        lambda: torch.hann_window(8),
        lambda: torch.eye(2).sum(),
    ],
)
@pytest.mark.sampled(2)
def test_a_function_without_a_tensor_argument(function):
    compiled = dovetail.compile(function, backend="inductor", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(), function())


def test_a_gradient_that_is_not_defined_with_padding_as_on_a_gpu():
    options = {"disable_padding_cpu": False}
    compiled = dovetail.compile(torch.matmul, backend="inductor", fullgraph=True, tiers="wait", backend_options=options)
    x, weight = torch.randn(3, 8), torch.randn(8, 4, requires_grad=True)
    gradients = [
        torch.autograd.grad(function(x, weight).square().sum(), weight) for function in (compiled, torch.matmul)
    ]
    torch.testing.assert_close(*gradients)
