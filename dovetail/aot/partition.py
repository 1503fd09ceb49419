"""Split a joint graph into a forward and a backward graph.

What the backward reads of the forward is either saved by the forward or computed again from what is saved. The core saves all of
it; a hook may choose otherwise (:data:`dovetail.aot.steps.choose_saved`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.descriptors import Descriptor, SavedForBackward
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import BY_USER_BACKWARD, IN_BACKWARD, SAVE, memory_of, must_stay, needed_for, saved_bytes
from dovetail.runtime.spec import InputOutput, ViewOutput
from dovetail.torch_private import tracing as private_tracing


@dataclass(frozen=True)
class PartitionedGraph:
    """Forward and backward graph. ``saved`` describes what goes between them, in the order of the backward's inputs.

    ``saved_bytes`` counts memory that is kept for the backward and is neither a parameter nor a buffer, each storage once.
    ``memory`` is a report on the memory budget, if there is one. ``reused`` are the names of the values that the forward takes
    after its inputs.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule | None
    saved: tuple[Descriptor, ...]
    saved_bytes: int
    recomputed_nodes: tuple[str, ...]
    memory: Any = None
    reused: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (
            f"{len(self.saved)} values saved for backward ({self.saved_bytes / 2**20:.2f} MiB), "
            f"{len(self.recomputed_nodes)} operators computed again"
        )
        return text if self.memory is None else f"{text}; {self.memory}"


@dataclass(frozen=True)
class Saved:
    """The nodes that the forward saves. ``report(bytes_saved, operators_recomputed)`` makes the report on a memory budget."""

    nodes: Sequence[torch.fx.Node]
    report: Callable[[int, int], Any] | None = None


class Split:
    """A joint graph while it is split: what belongs to the backward, and what that reads of the forward (``read``).

    ``reused`` are nodes whose values the caller has already, ``handed_out`` is the memory of results.
    """

    def __init__(self, joint: JointGraph, reused: Sequence[torch.fx.Node] = ()) -> None:
        self.reused = tuple(reused)
        self.nodes = list(joint.graph.nodes)
        self.primals, self.tangents = joint.primals, joint.tangents
        self.forward_outputs = joint.results[: joint.num_forward_outputs]
        self.gradients = joint.gradients
        self.has_backward = any(node is not None for node in self.gradients)
        self.of_backward: set[torch.fx.Node] = set(self.tangents)
        staying = [node for node in self.nodes if node.op == "call_function" and must_stay(node)]
        early = needed_for([*self.forward_outputs, *staying])
        inputs = [item.base if isinstance(item, ViewOutput) else item for item in joint.spec.outputs]
        returned = [self.primals[item.index] for item in inputs if isinstance(item, InputOutput)]
        self.handed_out = {memory_of(node) for node in (*self.forward_outputs, *returned)} - {None}
        for node in self.nodes:
            # To the backward belong regions of torch.utils.checkpoint, what hooks compute, and where the numbers are eager's, or
            # the argument is a result, what eager's formulas compute: they see what was written meanwhile.
            late = node.meta.get(BY_USER_BACKWARD) or (node.meta.get("phase") == "backward" and node not in early)
            late = late and not str(node.target).startswith("aten.sym_")  # sizes are no data
            results = [item for item in node.all_input_nodes if late and memory_of(item) in self.handed_out]
            for result in results:
                source_of(result).meta[SAVE] = True
            marked = any(map(node.meta.get, (IN_BACKWARD, BY_USER_BACKWARD))) or results
            by_formula = late and joint.is_exact and node.target is not operator.getitem  # a tuple cannot be saved
            if marked or by_formula or any(argument in self.of_backward for argument in node.all_input_nodes):
                self.of_backward.add(node)
        self.forward_staying = [node for node in staying if node not in self.of_backward]
        self.backward_staying = [node for node in staying if node in self.of_backward]
        given = set(self.nodes) - self.of_backward
        needed = needed_for([*self.gradients, *self.backward_staying], given) if self.has_backward else ()
        self.read = {node: None for node in self.nodes if node in given and node in needed}


def source_of(view: torch.fx.Node) -> torch.fx.Node:
    """The node that makes the memory of ``view``. Where it is saved, and not computed again, writes to results are noticed."""
    bases = [node for node in view.all_input_nodes if memory_of(node) == memory_of(view)]
    return source_of(bases[0]) if bases else view


ChooseSaved = Callable[[Split], Saved]
"""Says which values the forward saves, so that all of ``split.read`` can be had in the backward."""


def save_everything(split: Split) -> Saved:
    """Save what the backward reads, and compute nothing twice: eager's trade."""
    return Saved(as_saved(split.read))


def as_saved(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """These nodes in the form in which they can be saved."""
    return list(dict.fromkeys(form for node in nodes for form in _savable_forms(node)))


def _savable_forms(node: torch.fx.Node) -> list[torch.fx.Node]:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        raise AssertionError(f"{node.name} holds several tensors and cannot be saved as one value")
    if isinstance(value, torch.SymFloat) and node.op == "call_function":
        # Saved as what it is computed of, a tensor in the end: to every compiler that is an input like any other.
        return as_saved(node.all_input_nodes)
    return [node]


def partition(
    joint: JointGraph, choose: ChooseSaved = save_everything, reused: Sequence[torch.fx.Node] = ()
) -> PartitionedGraph:
    """Split a joint graph; ``choose`` says what is saved.

    Nodes that are ``reused`` are not computed: the forward takes their values after its other inputs. Raises
    :class:`OptionError` for a memory budget that cannot be kept.
    """
    split = Split(joint, reused)
    inputs = [*split.primals, *reused]
    saved = choose(split)
    kept = sorted(saved.nodes, key=lambda node: node._sort_key)
    outputs = [*split.forward_outputs, *kept]
    forward = _extract(joint, inputs, outputs, split.nodes, split.forward_staying)
    read = _reused_by(forward, joint.num_primals, reused)
    backward: torch.fx.GraphModule | None = None
    again: tuple[str, ...] = ()
    if split.has_backward:
        gradients = [*split.gradients, *[None] * len(read)]
        backward = _extract(joint, [*kept, *split.tangents], gradients, split.nodes, split.backward_staying)
        again = _computed_again(forward, backward)
    predicted = saved_bytes(kept)
    memory = None if saved.report is None else saved.report(predicted, len(again))
    known = [(node.meta.get("desc"), node.name) for node in kept]
    descriptors = tuple(item if isinstance(item, Descriptor) else SavedForBackward(name) for item, name in known)
    return PartitionedGraph(forward, backward, descriptors, predicted, again, memory, read)


def _reused_by(forward: torch.fx.GraphModule, count: int, reused: Sequence[torch.fx.Node]) -> tuple[str, ...]:
    """The reused values that the forward reads. The others are taken out of its inputs, the first ``count`` of which stay."""
    names = []
    for placeholder, node in zip(forward.graph.find_nodes(op="placeholder")[count:], reused, strict=True):
        if placeholder.users:
            names.append(node.name)
        else:
            forward.graph.erase_node(placeholder)
    return tuple(names)


def _computed_again(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> tuple[str, ...]:
    names = {node.name for node in forward.graph.nodes}
    return tuple(
        node.name
        for node in backward.graph.nodes
        if node.op == "call_function"
        and (node.meta.get(IN_BACKWARD) or (node.name in names and node.meta.get("phase") == "forward"))
    )


def _extract(
    joint: JointGraph,
    inputs: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node | None],
    order: Sequence[torch.fx.Node],
    staying: Sequence[torch.fx.Node],
) -> torch.fx.GraphModule:
    """The part of the graph that computes ``outputs`` and ``staying`` from ``inputs``, in the same order, with all metadata."""
    wanted = needed_for((*outputs, *staying), set(inputs))
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in order:
        if node in wanted and node not in copies:
            if node.op == "placeholder":
                raise AssertionError(f"{node.name} is needed and is not among the inputs")
            # Not by node_copy: its search of all arguments for raw symbols takes as long again.
            made = copies[node] = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
            made.args, made.kwargs = torch.fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            made.meta = dict(node.meta)
    graph.output([None if node is None else copies[node] for node in outputs])  # type: ignore[arg-type]
    return private_tracing.lazy_graph_module(joint.graph_module, graph)
