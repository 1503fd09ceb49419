"""The rules that every joint graph keeps, one small function each, and the check of all of them.

``JointGraph.apply`` checks after every pass, ``compile`` and ``export`` before they begin, ``joint.lint()`` on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from dovetail.aot.nodes import depending_on, writes_in_place
from dovetail.errors import GraphInvalidError

if TYPE_CHECKING:
    from dovetail.aot.joint_graph import JointGraph


class JointGraphError(GraphInvalidError):
    """A joint graph breaks one of its rules; ``rule`` is the name of the function that checks it.

    Structure, checked first:

    - ``is_ordered``: ``torch.fx`` accepts the graph, so that every node comes after the nodes that it reads.
    - ``has_described_inputs``: there is one placeholder for each input descriptor, in their order.
    - ``returns_described_list``: the graph returns one flat list with one entry for each output descriptor.

    Meaning:

    - ``returns_tensors``: an entry is a node with a fake tensor as its value, and None only where its descriptor is None.
    - ``has_fitting_gradients``: a gradient has the shape, dtype and device of the input that it is the gradient of.
    - ``keeps_outputs``: after a pass, a forward output has the shape, dtype and device that it had before.
    - ``is_functional``: no operator writes to its arguments.
    - ``has_forward_before_backward``: no forward output depends on a tangent.
    """

    def __init__(self, what: str, rule: str = "", advice: str = "") -> None:
        self.rule = rule
        super().__init__(what, advice=advice)


Violation = tuple[str, str]
"""The fault, and the advice on it."""
Rule = Callable[["JointGraph"], Iterator[Violation]]


def is_ordered(joint: JointGraph) -> Iterator[Violation]:
    """``torch.fx`` accepts the graph."""
    try:
        joint.graph.lint()
    except (RuntimeError, AssertionError, KeyError, AttributeError, TypeError) as error:
        yield f"the graph does not lint: {error}", "insert nodes after what they read"


def has_described_inputs(joint: JointGraph) -> Iterator[Violation]:
    """One placeholder for each input descriptor, in their order."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(joint.input_descriptors):
        yield f"the graph has {len(placeholders)} inputs and {len(joint.input_descriptors)} descriptors", ""
        return
    for node, descriptor in zip(placeholders, joint.input_descriptors, strict=True):
        if "val" not in node.meta:
            yield f"the input {node.name} has lost its fake value", "keep what is in a placeholder's meta"
        if node.meta.get("desc", descriptor) != descriptor:
            yield f"the input {node.name} has changed its place: {node.meta['desc']}, not {descriptor}", ""


def returns_described_list(joint: JointGraph) -> Iterator[Violation]:
    """One flat list with one entry for each output descriptor."""
    results: Any = next((node.args for node in joint.graph.find_nodes(op="output")), ())
    if len(results) != 1 or not isinstance(results[0], (list, tuple)):
        yield "the graph must return one flat list", ""
    elif len(results[0]) != len(joint.output_descriptors):
        yield f"the graph returns {len(results[0])} values for {len(joint.output_descriptors)} descriptors", ""


def returns_tensors(joint: JointGraph) -> Iterator[Violation]:
    """Tensors, and None only where there is nothing to return."""
    for position, (node, descriptor) in enumerate(zip(joint.results, joint.output_descriptors, strict=True)):
        if node is None:
            if descriptor is not None:
                yield f"{descriptor} is no longer returned", ""
        elif not isinstance(node, torch.fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            yield f"output {position} ({descriptor}) is not a tensor", ""


def has_fitting_gradients(joint: JointGraph) -> Iterator[Violation]:
    """Each gradient has the shape, dtype and device of its input."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    for position, node in enumerate(joint.results[joint.num_forward_outputs :]):
        if node is not None:
            descriptor = joint.output_descriptors[joint.num_forward_outputs + position]
            yield from _unlike(descriptor, node, placeholders[position])


def keeps_outputs(joint: JointGraph, before: JointGraph) -> Iterator[Violation]:
    """Each forward output has the shape, dtype and device that it had."""
    for position, node in enumerate(joint.results[: joint.num_forward_outputs]):
        old = before.results[position]
        if node is not None and old is not None:
            yield from _unlike(joint.output_descriptors[position], node, old)


def _unlike(descriptor: object, node: torch.fx.Node, promised: torch.fx.Node) -> Iterator[Violation]:
    value, wanted = node.meta["val"], promised.meta["val"]
    if (value.shape, value.dtype, value.device) != (wanted.shape, wanted.dtype, wanted.device):
        kinds = [f"{item.dtype}{list(item.shape)}" for item in (wanted, value)]
        if value.device != wanted.device:
            kinds = [f"{kind} on {item.device}" for kind, item in zip(kinds, (wanted, value), strict=True)]
        yield f"{descriptor} must be {kinds[0]}, but {node.name} is {kinds[1]}", ""


def is_functional(joint: JointGraph) -> Iterator[Violation]:
    """No operator writes to its arguments."""
    for node in joint.graph.nodes:
        if node.op == "call_function" and writes_in_place(node):
            yield (f"{node.name} = {node.target} writes to its arguments", "use the operator that returns a new tensor")


def has_forward_before_backward(joint: JointGraph) -> Iterator[Violation]:
    """No forward output depends on a tangent."""
    tangents = joint.graph.find_nodes(op="placeholder")[joint.num_primals :]
    dependent = depending_on(joint.graph.nodes, tangents)
    for node in joint.results[: joint.num_forward_outputs]:
        if node in dependent:
            yield f"the forward output {node} depends on a tangent", ""


STRUCTURE: tuple[Rule, ...] = (is_ordered, has_described_inputs, returns_described_list)
MEANING: tuple[Rule, ...] = (returns_tensors, has_fitting_gradients, is_functional, has_forward_before_backward)


def _require(name: str, violations: Iterator[Violation]) -> None:
    for what, advice in violations:
        raise JointGraphError(what, name, advice)


def check_structure(joint: JointGraph) -> None:
    """Raise :class:`JointGraphError` where a graph cannot even be walked: the first three rules."""
    for rule in STRUCTURE:
        _require(rule.__name__, rule(joint))


def check_joint(joint: JointGraph, before: JointGraph | None = None) -> None:
    """Raise :class:`JointGraphError` for the first rule that a graph breaks; ``before`` is the graph that a pass was given."""
    check_structure(joint)
    for rule in MEANING:
        _require(rule.__name__, rule(joint))
    if before is not None:
        _require(keeps_outputs.__name__, keeps_outputs(joint, before))
