"""Tensors that a pass brings with it: constants of the graph, on every backend and in artefacts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dovetail
from dovetail import JointGraph
from dovetail.aot.descriptors import Gradient, ParamInput, UserOutput

mul = torch.ops.aten.mul.Tensor
WEIGHT = Gradient(ParamInput("weight"))
MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])


def masked_by_an_argument(joint: JointGraph) -> None:
    joint.replace_output(WEIGHT, joint.call(mul, joint.gradient_of("weight"), MASK))


def masked_by_a_parameter(joint: JointGraph) -> None:
    joint.graph_module.register_parameter("mask", torch.nn.Parameter(MASK.clone()))
    with joint.graph.inserting_before(joint.graph.output_node()):
        mask = joint.graph.get_attr("mask")
    joint.replace_output(WEIGHT, joint.call(mul, joint.gradient_of("weight"), mask))


def masked_before_all_inputs(joint: JointGraph) -> None:
    joint.graph_module.register_buffer("mask", MASK.clone())
    with joint.graph.inserting_before(next(iter(joint.graph.nodes))):
        mask = joint.graph.get_attr("mask")
    joint.replace_output(WEIGHT, joint.call(mul, joint.gradient_of("weight"), mask))


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("edit", [masked_by_an_argument, masked_by_a_parameter, masked_before_all_inputs])
def test_a_gradient_is_masked(edit: Callable[[JointGraph], None], backend: str, tmp_path: Path) -> None:
    layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), [layer.weight])
    edited = dovetail.capture(layer, (x,)).apply(edit)
    edited.compile(backend)(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected * MASK)
    loaded = dovetail.load(edited.export(tmp_path / "step", layer.state_dict())).compile(backend)
    weight = loaded.state["weight"].requires_grad_()
    loaded(x).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected * MASK)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_an_output_is_shifted_by_what_the_tensor_held_at_the_pass(backend: str) -> None:
    layer, x, shift = torch.nn.Linear(3, 2), torch.randn(4, 3), torch.ones(2)

    def shifted(joint: JointGraph) -> None:
        joint.replace_output(UserOutput("0"), joint.call(torch.ops.aten.add.Tensor, joint.results[0], shift))

    step = dovetail.capture(layer, (x,)).apply(shifted).compile(backend)
    shift.zero_()
    torch.testing.assert_close(step(x), layer(x) + 1)


def test_two_passes_bring_two_constants() -> None:
    layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    joint = dovetail.capture(layer, (x,)).apply(masked_by_an_argument)

    def doubled(joint: JointGraph) -> None:
        joint.replace_output(WEIGHT, joint.call(mul, joint.gradient_of("weight"), torch.full((2, 3), 2.0)))

    (expected,) = torch.autograd.grad(layer(x).sum(), [layer.weight])
    joint.apply(doubled).compile("aten")(x).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, expected * MASK * 2)


def test_a_number_from_data_may_scale_a_gradient() -> None:
    layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)

    def scaled(joint: JointGraph) -> None:
        gradient = joint.gradient_of("weight")
        largest = joint.call(
            torch.ops.aten._local_scalar_dense.default, joint.call(torch.ops.aten.max.default, gradient)
        )
        joint.replace_output(WEIGHT, joint.call(mul, gradient, largest))

    (plain,) = torch.autograd.grad(layer(x).sum(), [layer.weight])
    for backend in ("aten", "inductor"):
        layer.zero_grad()
        dovetail.capture(layer, (x,)).apply(scaled).compile(backend)(x).sum().backward()
        torch.testing.assert_close(layer.weight.grad, plain * plain.max())
