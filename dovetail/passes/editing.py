"""Running a pass over a joint graph: on a copy, with new shapes filled in, checked, and noted in its provenance."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from dovetail.aot.check import JointGraphError, check_joint, check_structure, is_functional
from dovetail.aot.descriptors import Descriptor, Gradient, ParamInput
from dovetail.aot.joint_graph import JointGraph, Pass, PassRecord
from dovetail.aot.nodes import must_stay
from dovetail.errors import GraphInvalidError
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees


def apply_pass(joint: JointGraph, graph_pass: Pass, name: str | None = None) -> JointGraph:
    """See :meth:`dovetail.aot.joint_graph.JointGraph.apply`."""
    start = time.perf_counter()
    copy = joint.with_graph(copy_graph(joint.graph_module))
    for node in copy.graph.nodes:
        # To see later edits, also in copies that the pass makes.
        node.meta["signature"] = _signature(node)
    label = name if name is not None else str(getattr(graph_pass, "__name__", type(graph_pass).__name__))
    try:
        returned = graph_pass(copy)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        error.add_note(f"raised by the pass {label} at {last.filename}:{last.lineno}")
        raise
    if returned is None:
        returned = copy
    if isinstance(returned, torch.fx.GraphModule):
        returned = copy.with_graph(returned)
    if not isinstance(returned, JointGraph):
        raise GraphInvalidError(
            f"the pass {name or graph_pass} returned a {type(returned).__name__}", advice="return the joint graph"
        )
    check_structure(returned)
    for what, advice in is_functional(returned):
        # A write whose result nobody reads would be removed as dead code.
        raise JointGraphError(what, is_functional.__name__, advice)
    returned.graph.eliminate_dead_code(is_impure_node=must_stay)
    _lift_constants(returned)
    fill_values(returned)
    returned.graph_module.recompile()
    check_joint(returned, joint)
    seconds = time.perf_counter() - start
    record = PassRecord(label, seconds, len(joint.graph.nodes), len(returned.graph.nodes))
    return returned.with_graph(returned.graph_module, record)


def find_placeholder(joint: JointGraph, descriptor: Descriptor) -> torch.fx.Node:
    """See :meth:`dovetail.aot.JointGraph.placeholder`."""
    for node, found in zip(joint.graph.find_nodes(op="placeholder"), joint.input_descriptors, strict=True):
        if found == descriptor:
            return node
    raise KeyError(str(descriptor))


def find_gradient(joint: JointGraph, parameter: str | Descriptor) -> torch.fx.Node:
    """See :meth:`dovetail.aot.JointGraph.gradient_of`."""
    wanted = Gradient(ParamInput(parameter) if isinstance(parameter, str) else parameter)
    for node, found in zip(joint.results, joint.output_descriptors, strict=True):
        if found == wanted and node is not None:
            return node
    raise KeyError(str(wanted))


def replace_output(joint: JointGraph, descriptor: Descriptor, node: torch.fx.Node) -> None:
    """See :meth:`dovetail.aot.JointGraph.replace_output`."""
    if descriptor not in joint.output_descriptors:
        raise KeyError(str(descriptor))
    results = joint.results
    results[joint.output_descriptors.index(descriptor)] = node
    joint.graph.output_node().args = (results,)


def insert_call(joint: JointGraph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
    """See :meth:`dovetail.aot.joint_graph.JointGraph.call`."""
    if not callable(target):
        raise GraphInvalidError(
            f"{target!r} is not an operator", advice="give an operator, such as torch.ops.aten.mul.Tensor"
        )
    args, kwargs = trees.tree_map(
        lambda item: _constant(joint, item) if isinstance(item, torch.Tensor) else item, (args, kwargs)
    )
    nodes: list[torch.fx.Node] = []
    torch.fx.node.map_arg((args, kwargs), nodes.append)
    inputs = joint.graph.find_nodes(op="placeholder")
    tangents = inputs[joint.num_primals :]
    is_late = any(
        node in tangents or node.meta.get("phase", "backward") == "backward"
        for node in nodes
        if node not in inputs[: joint.num_primals]
    )
    phase = "backward" if is_late else "forward"
    last = max([*inputs[-1:], *nodes], key=lambda node: node._sort_key, default=None)
    with joint.graph.inserting_after(last):
        made = joint.graph.call_function(target, args, kwargs)
    made.meta["phase"] = phase
    if last is not None and "user_line" in last.meta:
        made.meta["user_line"] = last.meta["user_line"]
    return made


def _constant(joint: JointGraph, tensor: torch.Tensor) -> torch.fx.Node:
    """A node with the present values of a tensor of the pass, in the form that constants have in a captured graph."""
    module, constant = joint.graph_module, tensor.detach().clone()
    name = next(name for name in map("constant_{}".format, itertools.count()) if not hasattr(module, name))
    module.register_buffer(name, constant)
    with joint.graph.inserting_after(next(iter(joint.graph.find_nodes(op="placeholder")[-1:]), None)):
        node = joint.graph.get_attr(name)
    with joint.graph.inserting_after(node):
        copy = joint.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (node,))
    with private_tracing.disable_current_modes():
        node.meta["val"] = joint.fake_mode.from_tensor(constant, static_shapes=True)
    copy.meta["phase"] = "forward"
    return copy


def _lift_constants(joint: JointGraph) -> None:
    """Turn tensors that a pass has put into the graph module itself into constants."""
    for node in joint.graph.find_nodes(op="get_attr"):
        held = operator.attrgetter(str(node.target))(joint.graph_module)
        if isinstance(held, torch.Tensor) and "val" not in node.meta:
            node.replace_all_uses_with(_constant(joint, held))
            joint.graph.erase_node(node)


def fill_values(joint: JointGraph) -> None:
    """Compute the fake value of nodes that have none, or that a pass has changed since they were signed."""
    stale: set[torch.fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        changed = "val" not in node.meta or any(argument in stale for argument in node.all_input_nodes)
        if not changed and _signature(node) == node.meta.get("signature", _signature(node)):
            continue
        args = torch.fx.node.map_arg(node.args, lambda item: item.meta["val"])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda item: item.meta["val"])
        try:
            with private_tracing.disable_current_modes(), joint.fake_mode, torch.no_grad(), _without_bookkeeping(joint):
                value = node.target(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
            raise GraphInvalidError(f"{node.name} = {node.target} does not accept its arguments: {error}") from error
        node.meta["val"] = value
        node.meta.setdefault("phase", "backward")
        stale.add(node)


@contextlib.contextmanager
def _without_bookkeeping(joint: JointGraph) -> Iterator[None]:
    """Nobody asks later which node made a size from data; torch logs its error here before it raises it."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with joint.fake_mode.shape_env.ignore_fresh_unbacked_symbols():
            yield
    finally:
        logging.disable(level)


def _signature(node: torch.fx.Node) -> tuple[Any, ...]:
    return (node.target, repr(node.args), repr(node.kwargs))


def copy_graph(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph with nodes of its own; fake values are shared."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))  # type: ignore[arg-type]
    for old, new in zip(module.graph.nodes, graph.nodes, strict=True):
        new.meta.update(old.meta)
    return private_tracing.lazy_graph_module(module, graph)
