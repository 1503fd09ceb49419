"""The stages by hand, passes on the joint graph, export and load."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dovetail
from dovetail import aot, errors
from dovetail.aot.backward_graphs import expected_pattern
from dovetail.aot.descriptors import Gradient, ParamInput, Tangent, UserInput
from dovetail.aot.partition import partition
from dovetail.aot.tangents import specialise_tangents
from dovetail.artefacts.export import export_joint
from dovetail.artefacts.load import load
from dovetail.passes.recompute import saved_by


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x))).sum()


def gradients(net: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    net.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None}


def test_stages_on_one_exit_stack() -> None:
    net, x = Net(), torch.randn(3, 4)
    with contextlib.ExitStack() as stack:
        state = aot.create_state(stack, net, (x,))
        joint = aot.capture_joint(state)
        compiled = aot.compile_joint(state, joint, "aten")
    assert not state.is_open
    assert isinstance(joint.input_descriptors[0], (ParamInput, UserInput))
    assert {str(d) for d in joint.input_descriptors} >= {"parameter 'first.weight'", "input L['x']"}
    assert isinstance(joint.input_descriptors[-1], Tangent)
    expected = gradients(net, net(x))
    actual = gradients(net, compiled(x))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    with pytest.raises(errors.StageError):
        aot.capture_joint(state)


def test_printed_graph_names_lines_shapes_and_descriptors() -> None:
    text = str(dovetail.capture(Net(), (torch.randn(3, 4),)))
    for part in (
        "f32[3, 4]",
        "parameter 'first.weight'",
        "gradient of parameter 'second.bias'",
        "test_stages.py",
        "backward:",
    ):
        assert part in text, text


def test_scaling_one_gradient() -> None:
    net, x = Net(), torch.randn(3, 4)
    joint = dovetail.capture(net, (x,))

    def scale(graph: dovetail.JointGraph) -> dovetail.JointGraph:
        node = graph.gradient_of("first.weight")
        with graph.graph.inserting_after(node):
            scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (node, 3.0))
        graph.replace_output(Gradient(ParamInput("first.weight")), scaled)
        return graph

    edited = joint.apply(scale)
    assert edited.provenance[0].name == "scale"
    expected = gradients(net, net(x))
    actual = gradients(net, edited.compile(backend="aten")(x))
    assert torch.equal(actual["first.weight"], expected["first.weight"] * 3.0)
    assert torch.equal(actual["second.weight"], expected["second.weight"])
    untouched = gradients(net, joint.compile(backend="aten")(x))
    assert torch.equal(untouched["first.weight"], expected["first.weight"])


def test_saving_fewer_activations_changes_no_number() -> None:
    net, x = Net(), torch.randn(256, 4)
    joint = dovetail.capture(net, (x,))

    def recompute_gelu(graph: dovetail.JointGraph) -> None:
        for node in graph.nodes_of("forward"):
            if node.target is torch.ops.aten.addmm.default:
                node.meta["recompute"] = True

    everything, fewer = (
        partition(joint, saved_by("save_all")),
        partition(joint.apply(recompute_gelu), saved_by("minimum_cut")),
    )
    assert fewer.saved_bytes < everything.saved_bytes
    assert fewer.recomputed_nodes
    named = dict(net.named_parameters())
    values = [
        named[d.fqn].detach() if isinstance(d, ParamInput) else x for d in joint.input_descriptors[: joint.num_primals]
    ]
    results = []
    for part in (everything, fewer):
        outputs = part.forward(*values)
        assert part.backward is not None
        results.append(part.backward(*outputs[joint.num_forward_outputs :], torch.ones(())))
    for left, right in zip(*results, strict=True):
        assert (left is None and right is None) or torch.equal(left, right)


def test_random_operators_are_never_computed_twice() -> None:
    joint = dovetail.capture(
        lambda x: torch.nn.functional.dropout(x, 0.5, True).sin().sum(), (torch.ones(64, requires_grad=True),)
    )
    part = partition(joint, saved_by("minimum_cut"))
    assert part.backward is not None
    assert not [
        n for n in part.backward.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
    ]


def test_an_undefined_tangent_is_no_zero() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2).sum(), torch.log(x - x)

    x = torch.ones(3, requires_grad=True)
    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    compiled(x)[0].backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]
    joint = dovetail.capture(f, (x,))
    assert expected_pattern(joint) == (True, False)
    part = partition(joint, saved_by("save_all"))
    assert part.backward is not None
    count = len(part.backward.graph.find_nodes(op="placeholder"))
    special, _ = specialise_tangents(part.backward, [count - 2, count - 1], [False, False])
    assert special.graph.output_node().args[0] == [None]


def test_zeros_for_an_undefined_tangent_are_an_operator_that_backends_know() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin().unbind(0)

    x = torch.ones(3, 2, requires_grad=True)
    part = partition(dovetail.capture(f, (x,)), saved_by("save_all"))
    assert part.backward is not None
    count = len(part.backward.graph.find_nodes(op="placeholder"))
    special, _ = specialise_tangents(part.backward, range(count - 3, count), [True, False, True])
    made = {node.target for node in special.graph.nodes}
    assert torch.ops.aten.full.default in made
    # Those that Inductor wants decomposed, it compiles no more.
    assert not made & {torch.ops.aten.zeros.default, torch.ops.aten.ones.default}


def break_shape(graph: dovetail.JointGraph) -> None:
    node = graph.gradient_of("first.weight")
    with graph.graph.inserting_after(node):
        graph.replace_output(
            Gradient(ParamInput("first.weight")), graph.graph.call_function(torch.ops.aten.sum.default, (node,))
        )


def break_order(graph: dovetail.JointGraph) -> None:
    operators = graph.nodes_of("forward")
    operators[0].prepend(operators[-1])


def break_count(graph: dovetail.JointGraph) -> None:
    output = graph.graph.output_node()
    output.args = (list(output.args[0])[:-1],)  # type: ignore[arg-type]


def break_purity(graph: dovetail.JointGraph) -> None:
    node = graph.gradient_of("first.weight")
    with graph.graph.inserting_after(node):
        graph.replace_output(
            Gradient(ParamInput("first.weight")), graph.graph.call_function(torch.ops.aten.mul_.Tensor, (node, 2.0))
        )


@pytest.mark.parametrize("damage", [break_shape, break_order, break_count, break_purity])
def test_nonsense_edits_are_refused_and_leave_the_graph_alone(damage: object) -> None:
    joint = dovetail.capture(Net(), (torch.randn(3, 4),))
    before = str(joint)
    with pytest.raises(errors.GraphInvalidError):
        joint.apply(damage)  # type: ignore[arg-type]
    assert str(joint) == before


@pytest.mark.slow
def test_export_runs_in_a_process_without_the_users_code(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(3, 4)
    joint = dovetail.capture(net, (x,))
    path = export_joint(None, joint, tmp_path / "step")
    named = dict(net.named_parameters())
    values = [
        named[d.fqn].detach() if isinstance(d, ParamInput) else x for d in joint.input_descriptors[: joint.num_primals]
    ]
    torch.save(values, tmp_path / "values.pt")
    program = (
        "import sys, torch; from dovetail import load\n"
        "graph = load(sys.argv[1]); values = torch.load(sys.argv[2])\n"
        "torch.save(graph.joint.graph_module(*values, torch.ones(())), sys.argv[3])"
    )
    command = [sys.executable, "-c", program, str(path), str(tmp_path / "values.pt"), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    output, *grads = torch.load(tmp_path / "out.pt")
    assert torch.equal(output, net(x))
    expected = gradients(net, net(x))
    for descriptor, gradient in zip(joint.input_descriptors, grads, strict=False):
        if isinstance(descriptor, ParamInput):
            assert torch.equal(gradient, expected[descriptor.fqn])


def test_damaged_artefacts_are_refused(tmp_path: Path) -> None:
    path = export_joint(None, dovetail.capture(Net(), (torch.randn(3, 4),)), tmp_path / "step")
    good = (path / "graph.json").read_text()
    document = json.loads(good)
    document["version"] = 99
    evil = good.replace("aten::addmm.default", "aten::system.default")
    for text in (good[: len(good) // 2], good.replace("4", "5", 1), json.dumps(document), evil, "[]", ""):
        (path / "graph.json").write_text(text)
        with pytest.raises(errors.ArtefactError):
            load(path)
    (path / "graph.json").write_text(good)
    load(path)
    with pytest.raises(errors.ArtefactError):
        export_joint(None, dovetail.capture(Net(), (torch.randn(3, 4),)), path)
