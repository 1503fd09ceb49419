"""Each rule of a joint graph, broken once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail import JointGraph, errors
from dovetail.aot import check
from dovetail.aot.check import JointGraphError
from dovetail.aot.descriptors import Gradient, ParamInput, UserOutput

aten = torch.ops.aten
Damage = Callable[[JointGraph], Any]


def out_of_order(joint: JointGraph) -> None:
    operators = joint.nodes_of("forward")
    operators[0].prepend(operators[-1])


def inputs_swapped(joint: JointGraph) -> None:
    first, second = joint.primals[:2]
    first.prepend(second)


def one_result_less(joint: JointGraph) -> None:
    joint.graph.output_node().args = (joint.results[:-1],)


def a_missing_result(joint: JointGraph) -> None:
    joint.graph.output_node().args = ([*joint.results[:-1], None],)


def a_gradient_of_another_shape(joint: JointGraph) -> None:
    joint.replace_output(Gradient(ParamInput("weight")), joint.call(aten.sum.default, joint.gradient_of("weight")))


def an_output_of_another_shape(joint: JointGraph) -> None:
    joint.replace_output(UserOutput("0"), joint.call(aten.sum.default, joint.results[0]))


def a_write(joint: JointGraph) -> None:
    gradient = joint.gradient_of("weight")
    joint.replace_output(Gradient(ParamInput("weight")), joint.call(aten.mul_.Tensor, gradient, 2.0))


def a_forward_of_the_backward(joint: JointGraph) -> None:
    joint.replace_output(UserOutput("0"), joint.call(aten.mul.Tensor, joint.tangents[0], 2.0))


DAMAGES: dict[str, Damage] = {
    "is_ordered": out_of_order,
    "has_described_inputs": inputs_swapped,
    "returns_described_list": one_result_less,
    "returns_tensors": a_missing_result,
    "has_fitting_gradients": a_gradient_of_another_shape,
    "keeps_outputs": an_output_of_another_shape,
    "is_functional": a_write,
    "has_forward_before_backward": a_forward_of_the_backward,
}


@pytest.mark.parametrize("rule", DAMAGES)
def test_a_broken_rule_is_named(rule: str) -> None:
    joint = dovetail.capture(torch.nn.Linear(3, 2), (torch.randn(4, 3),))
    before = str(joint)
    with pytest.raises(JointGraphError) as caught:
        joint.apply(DAMAGES[rule])
    assert caught.value.rule == rule and isinstance(caught.value, errors.GraphInvalidError)
    assert str(joint) == before
    joint.lint()


def test_every_rule_is_documented_and_checked() -> None:
    documented = re.findall(r"``(\w+)``:", JointGraphError.__doc__ or "")
    rules = [rule.__name__ for rule in (*check.STRUCTURE, *check.MEANING)]
    assert sorted(documented) == sorted([*rules, "keeps_outputs"]) == sorted(DAMAGES)


def test_compile_checks_a_graph_that_was_edited_by_hand() -> None:
    joint = dovetail.capture(torch.nn.Linear(3, 2), (torch.randn(4, 3),))
    one_result_less(joint)
    with pytest.raises(JointGraphError):
        joint.compile("aten")


def unread_write(joint: JointGraph) -> None:
    joint.call(aten.mul_.Tensor, joint.results[0], 2.0)


def no_output(joint: JointGraph) -> None:
    joint.graph.erase_node(joint.graph.output_node())


def forgotten_values(joint: JointGraph) -> None:
    for node in joint.graph.nodes:
        node.meta.clear()


def a_gradient_elsewhere(joint: JointGraph) -> None:
    zeros = joint.call(aten.zeros.default, [2, 3], device="meta")
    joint.replace_output(Gradient(ParamInput("weight")), zeros)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (unread_write, "writes to its arguments"),
        (no_output, "one flat list"),
        (forgotten_values, "has lost its fake value"),
        (a_gradient_elsewhere, "on cpu, but .* on meta"),
        (lambda joint: joint.call("mul", joint.results[0]), "'mul' is not an operator"),
    ],
)
def test_an_edit_that_makes_no_sense_is_one_error(damage: Damage, says: str) -> None:
    joint = dovetail.capture(torch.nn.Linear(3, 2), (torch.randn(4, 3),))
    before = str(joint)
    with pytest.raises(errors.GraphInvalidError, match=says):
        joint.apply(damage)
    assert str(joint) == before


def test_torch_logs_nothing_about_an_edit_that_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    joint = dovetail.capture(torch.nn.Linear(3, 2), (torch.randn(4, 3),))
    with pytest.raises(errors.GraphInvalidError, match="does not accept its arguments"):
        joint.apply(
            lambda joint: joint.replace_output(UserOutput("0"), joint.call(aten.mm.default, *[joint.results[0]] * 2))
        )
    assert not caplog.records
