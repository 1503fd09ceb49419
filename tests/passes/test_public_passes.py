"""The passes that come with Dovetail, against what eager code does in their place."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail import errors
from dovetail.aot import passes
from dovetail.aot.descriptors import ParamInput
from dovetail.aot.partition import partition
from dovetail.passes.recompute import saved_by


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)
    )


def gradients(module: torch.nn.Module, call: object, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    (call(x).square().sum() * 10).backward()  # type: ignore[operator]
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipping_is_that_of_torch(max_norm: float, backend: str) -> None:
    module, x = network(), torch.randn(8, 16)
    gradients(module, module, x)
    torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    expected = [parameter.grad.clone() for parameter in module.parameters()]  # type: ignore[union-attr]
    compiled = dovetail.compile(module, backend=backend, fullgraph=True, passes=(passes.clip_gradients(max_norm),))
    actual = gradients(module, compiled, x)
    if backend == "aten":
        assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))
    torch.testing.assert_close(actual, expected)


def test_scaling() -> None:
    module, x = network(), torch.randn(8, 16)
    expected = gradients(module, module, x)
    joint = dovetail.capture(module, (x,)).apply(passes.scale_gradients(0.5, ["0.weight"]), "half")
    actual = gradients(module, joint.compile("aten"), x)
    assert torch.equal(actual[0], expected[0] * 0.5)
    assert all(torch.equal(left, right) for left, right in zip(expected[1:], actual[1:], strict=True))
    assert joint.provenance[-1].name == "half" and joint.provenance[-1].nodes_after > joint.provenance[-1].nodes_before
    with pytest.raises(KeyError, match="no gradient"):
        joint.apply(passes.scale_gradients(0.5, ["9.weight"]))


def test_a_scaled_loss_keeps_small_gradients() -> None:
    def tiny(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ((x @ weight) * 1e-4 * 1e-4).sum()

    x, weight = torch.full((2, 4), 100.0, dtype=torch.float16), torch.ones(4, 4, dtype=torch.float16).requires_grad_()

    def gradient(call: object) -> torch.Tensor:
        return torch.autograd.grad(call(x, weight), weight)[0]  # type: ignore[operator]

    scaled = dovetail.compile(tiny, backend="aten", passes=(passes.scale_loss(1024.0),), fullgraph=True)
    assert not gradient(tiny).any() and gradient(scaled).all()
    plain, wide = network(), torch.randn(8, 16)
    joint = dovetail.capture(plain, (wide,)).apply(passes.scale_loss(1024.0))
    expected, actual = gradients(plain, plain, wide), gradients(plain, joint.compile("aten"), wide)
    assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))


@pytest.mark.parametrize("strategy", ["save_all", "minimum_cut"])
def test_saving_in_bfloat16_halves_what_is_kept(strategy: str) -> None:
    module, x = network(), torch.randn(512, 16)
    joint = dovetail.capture(module, (x,))
    short = joint.apply(passes.save_in_bfloat16(minimum_bytes=1 << 12))
    before, after = partition(joint, saved_by(strategy)), partition(short, saved_by(strategy))  # type: ignore[arg-type]
    assert after.saved_bytes <= (0.6 if strategy == "save_all" else 1.0) * before.saved_bytes
    compiled = short.compile("aten")
    assert torch.equal(compiled(x), module(x))
    expected, actual = gradients(module, module, x), gradients(module, compiled, x)
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-1)
    assert any(not torch.equal(left, right) for left, right in zip(expected, actual, strict=True))
    budget = short.compile("aten", memory_budget=0.0)
    gradients(module, budget, x)
    assert budget.memory is not None and budget.memory.measured == budget.memory.predicted


@pytest.mark.parametrize("strategy", ["save_all", "minimum_cut"])
def test_offloading_changes_no_number(strategy: str) -> None:
    module, x = network(), torch.randn(64, 16)
    joint = dovetail.capture(module, (x,))
    to_copy = torch.ops.aten._to_copy.default
    assert not joint.apply(passes.offload_saved(count=2)).graph.find_nodes(op="call_function", target=to_copy)
    moved = joint.apply(passes.offload_saved(count=2, force=True))
    copies = moved.graph.find_nodes(op="call_function", target=to_copy)
    assert len(copies) == 4
    plan = partition(moved, saved_by(strategy))  # type: ignore[arg-type]
    assert plan.backward is not None
    names = {node.name for node in plan.backward.graph.find_nodes(op="placeholder")}
    assert sum(copy.name in names for copy in copies) == 2
    expected, actual = gradients(module, module, x), gradients(module, moved.compile("aten"), x)
    assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))
    with pytest.raises(errors.OptionError):
        passes.offload_saved()


@pytest.mark.gpu
def test_offloading_moves_to_the_cpu() -> None:
    module, x = network().cuda(), torch.randn(4096, 16, device="cuda")
    joint = dovetail.capture(module, (x,))
    moved = joint.apply(passes.offload_saved(total_bytes=1 << 20))
    plan = partition(moved, saved_by("save_all"))
    assert plan.backward is not None
    kept = [node.meta["val"].device.type for node in plan.backward.graph.find_nodes(op="placeholder")]
    assert "cpu" in kept
    expected, actual = gradients(module, module, x), gradients(module, moved.compile("aten"), x)
    assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))


def test_passes_follow_each_other_and_are_exported(tmp_path: object) -> None:
    module, x = network(), torch.randn(512, 16)
    joint = dovetail.capture(module, (x,))
    for item in (passes.save_in_bfloat16(1 << 12), passes.scale_loss(8.0), passes.clip_gradients(0.25)):
        joint = joint.apply(item)
    expected = gradients(module, joint.compile("aten"), x)
    loaded = dovetail.load(joint.export(f"{tmp_path}/step", values=module.state_dict()))
    (loaded(x).square().sum() * 10).backward()
    names = [name for name, _ in module.named_parameters()]
    assert all(torch.equal(loaded.state[name].grad, value) for name, value in zip(names, expected, strict=True))


def test_a_pass_that_breaks_the_graph_is_refused_and_leaves_it_alone() -> None:
    module, x = network(), torch.randn(8, 16)
    joint = dovetail.capture(module, (x,))
    before = str(joint)

    def sum_it(graph: dovetail.JointGraph) -> None:
        node = graph.gradient_of("0.weight")
        graph.replace_output(
            graph.output_descriptors[graph.results.index(node)], graph.call(torch.ops.aten.sum.default, node)
        )

    def nonsense(graph: dovetail.JointGraph) -> None:
        node = graph.gradient_of("0.weight")
        graph.replace_output(
            graph.output_descriptors[graph.results.index(node)], graph.call(torch.ops.aten.mm.default, node, node)
        )

    for bad in (sum_it, nonsense):
        with pytest.raises(errors.GraphInvalidError):
            joint.apply(bad)
    assert str(joint) == before


def test_nodes_are_found_by_what_they_stand_for() -> None:
    joint = dovetail.capture(torch.nn.Linear(2, 3), (torch.ones(4, 2),))
    weight = ParamInput("weight")
    assert joint.placeholder(weight).meta["val"].shape == (3, 2)
    place = joint.primals.index(joint.placeholder(weight))
    assert joint.gradient_of(weight) is joint.gradient_of("weight") is joint.gradients[place]
    for find in (joint.placeholder, joint.gradient_of):
        with pytest.raises(KeyError, match="other"):
            find(ParamInput("other"))
    with pytest.raises(KeyError, match="other"):
        joint.replace_output(ParamInput("other"), joint.primals[0])
