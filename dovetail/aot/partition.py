"""Split a joint graph into a forward and a backward graph by a minimum cut.

What the backward reads is either saved by the forward or computed again from what is saved. The choice is a minimum cut in a
flow network whose capacities are bytes (the construction of Chen et al., "Training Deep Nets with Sublinear Memory Cost",
2016, recast as a cut as in min-cut rematerialisation); networkx solves it. Random operators and expensive operators are never
computed twice, so the numbers never change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import networkx
import torch

from dovetail.aot.collective_errors import is_exchange
from dovetail.aot.descriptors import BufferInput, Descriptor, ParamInput, SavedForBackward, Tangent
from dovetail.aot.joint_graph import BY_USER_BACKWARD, IN_BACKWARD, SAVE, JointGraph, must_stay
from dovetail.aot.memory_budget import MemoryReport, choose_budget, collect_candidates, saved_bytes, solve
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing

Strategy = Literal["minimum_cut", "save_all"]
CHEAP_NAMES = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "expand",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "detach",
        "alias",
        "as_strided",
        "split",
        "split_with_sizes",
        "unbind",
        "diagonal",
        "full",
        "full_like",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "new_zeros",
        "new_ones",
        "empty_like",
        "arange",
        "scalar_tensor",
        "_to_copy",
        "clone",
        "cat",
        "stack",
        "constant_pad_nd",
        "where",
        "masked_fill",
    }
)


_BY_INDEX = frozenset(
    {"gather", "index", "index_select", "embedding", "scatter", "select_scatter", "slice_scatter", "iota", "flip"}
)
# Torch 2.11 has no such tag.
_REDUCTION = getattr(torch.Tag, "reduction", None)


@dataclass(frozen=True)
class PartitionedGraph:
    """Forward and backward graph. ``saved`` describes what goes between them, in the order of the backward's inputs.

    ``saved_bytes`` counts memory that is kept for the backward and is neither a parameter nor a buffer, each storage once.
    ``memory`` is there where a budget was given. ``given`` are the names of the values that the forward takes after its inputs.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule | None
    saved: tuple[Descriptor, ...]
    saved_bytes: int
    recomputed_nodes: tuple[str, ...]
    memory: MemoryReport | None = None
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (
            f"{len(self.saved)} values saved for backward ({self.saved_bytes / 2**20:.2f} MiB), "
            f"{len(self.recomputed_nodes)} operators computed again"
        )
        return text if self.memory is None else f"{text}; {self.memory}"


def value_bytes(node: torch.fx.Node) -> int:
    """Bytes of a node's tensor; one for a number."""
    value = node.meta.get("val")
    return max(1, private_sizes.hint(value.numel()) * value.element_size()) if isinstance(value, torch.Tensor) else 1


def _is_cheap(node: torch.fx.Node) -> bool:
    if private_sizes.is_symbolic(node.meta.get("val")):
        return True
    if node.meta.get(SAVE):
        return False
    if node.meta.get("recompute"):
        return not must_stay(node)
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    if node.op != "call_function" or must_stay(node):
        return False
    return _by_elements(node)


def _by_elements(node: torch.fx.Node) -> bool:
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    return getattr(node.target, "_opname", "") in CHEAP_NAMES


def is_fused(node: torch.fx.Node) -> bool:
    """Whether a compiler that fuses computes this operator in one kernel with its neighbours, in no memory of its own."""
    if node.target is operator.getitem or _by_elements(node) or _REDUCTION in getattr(node.target, "tags", ()):
        return True
    return getattr(node.target, "_opname", "") in _BY_INDEX


class _Split:
    """The sets that both strategies need."""

    def __init__(self, joint: JointGraph) -> None:
        graph = joint.graph_module.graph
        self.nodes = list(graph.nodes)
        placeholders = graph.find_nodes(op="placeholder")
        self.primals = placeholders[: joint.num_primals]
        self.tangents = placeholders[joint.num_primals :]
        results: Any = graph.output_node().args[0]
        self.forward_outputs = list(results[: joint.num_forward_outputs])
        self.gradients = list(results[joint.num_forward_outputs :])
        self.dependent: set[torch.fx.Node] = set(self.tangents)
        for node in self.nodes:
            # What torch.utils.checkpoint computes again belongs to the backward, though no tangent is needed for it. So does what
            # a hook computes: of a tensor that was written to meanwhile, eager's hook sees the new content.
            if self._is_of_backward(node) or any(argument in self.dependent for argument in node.all_input_nodes):
                self.dependent.add(node)
        handed_out = {storage for node in self.forward_outputs if (storage := memory_of(node)) is not None}
        for node in self.nodes:
            if node.meta.get(BY_USER_BACKWARD):
                for argument in node.all_input_nodes:
                    # Saved as it is, a write to it is noticed. Computed again, it would be what it was.
                    if argument not in self.dependent and memory_of(argument) in handed_out:
                        argument.meta[SAVE] = True
        self.needed: set[torch.fx.Node] = set()
        self.read: dict[torch.fx.Node, None] = {}
        staying = [node for node in self.nodes if node.op == "call_function" and must_stay(node)]
        self.forward_staying = [node for node in staying if node not in self.dependent]
        self.backward_staying = [node for node in staying if node in self.dependent]
        stack = [*[node for node in self.gradients if node is not None], *self.backward_staying]
        for node in stack:
            if node not in self.dependent:
                self.read[node] = None
        while stack:
            node = stack.pop()
            if node in self.needed or node not in self.dependent:
                continue
            self.needed.add(node)
            for argument in node.all_input_nodes:
                if argument in self.dependent:
                    stack.append(argument)
                else:
                    self.read[argument] = None

    @staticmethod
    def _is_of_backward(node: torch.fx.Node) -> bool:
        return bool(node.meta.get(IN_BACKWARD) or node.meta.get(BY_USER_BACKWARD))


def memory_of(node: torch.fx.Node | None) -> int | None:
    """The memory of a node's example tensor, which views share."""
    value = None if node is None else node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def partition(
    joint: JointGraph,
    strategy: Strategy = "minimum_cut",
    memory_budget: float | int | None = None,
    given: Sequence[torch.fx.Node] = (),
) -> PartitionedGraph:
    """Split a joint graph. ``"save_all"`` saves what the backward reads and computes nothing twice.

    Nodes that are ``given`` are not computed: the forward takes their values after its other inputs.

    With a ``memory_budget`` below 1 as much is computed again as it takes to stay within it, whatever the strategy: see
    :mod:`dovetail.aot.memory_budget`. Raises :class:`OptionError` for a budget that cannot be kept.
    """
    split = _Split(joint)
    if not any(node is not None for node in split.gradients):
        forward = _extract(joint, [*split.primals, *given], split.forward_outputs, split.nodes, split.forward_staying)
        memory = None if memory_budget is None else MemoryReport(0, 0, 0, 0, 0)
        return PartitionedGraph(forward, None, (), 0, (), memory, _read_of(forward, joint.num_primals, given))
    saved = _tidy(list(split.read) if strategy == "save_all" else minimum_cut(split.read, given=given))
    largest = saved_bytes(saved)
    smallest, allowed = 0, largest
    if memory_budget is not None:
        candidates = collect_candidates(split.read, _never_again)
        least = _tidy(solve(candidates, None))
        smallest = saved_bytes(least)
        allowed = choose_budget(memory_budget, smallest, largest)
        if allowed < largest:
            saved = _tidy(solve(candidates, allowed)) if allowed > smallest else least
    order = {node: position for position, node in enumerate(split.nodes)}
    saved.sort(key=lambda node: order[node])
    forward = _extract(
        joint, [*split.primals, *given], [*split.forward_outputs, *saved], split.nodes, split.forward_staying
    )
    read = _read_of(forward, joint.num_primals, given)
    gradients = [*split.gradients, *[None] * len(read)]
    backward = _extract(joint, [*saved, *split.tangents], gradients, split.nodes, split.backward_staying)
    described = tuple(_describe(node) for node in saved)
    forward_names = {node.name for node in forward.graph.nodes}
    again = tuple(
        node.name
        for node in backward.graph.nodes
        if node.op == "call_function"
        and (node.meta.get(IN_BACKWARD) or (node.name in forward_names and node.meta.get("phase") == "forward"))
    )
    predicted = saved_bytes(saved)
    memory = None
    if memory_budget is not None:
        memory = MemoryReport(allowed, predicted, min(smallest, largest), largest, len(again))
    return PartitionedGraph(forward, backward, described, predicted, again, memory, read)


def _read_of(forward: torch.fx.GraphModule, count: int, given: Sequence[torch.fx.Node]) -> tuple[str, ...]:
    """The given values that the forward reads; the others are taken out of its inputs, the first ``count`` of which stay."""
    names = []
    for placeholder, node in zip(forward.graph.find_nodes(op="placeholder")[count:], given, strict=True):
        if placeholder.users:
            names.append(node.name)
        else:
            forward.graph.erase_node(placeholder)
    return tuple(names)


def _tidy(saved: list[torch.fx.Node]) -> list[torch.fx.Node]:
    return list(dict.fromkeys(_without_number(_without_tuple(node)) for node in saved))


# Twice the same operator may give two results, or two sizes of different names.
_ONCE = {torch.Tag.nondeterministic_bitwise, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _never_again(node: torch.fx.Node) -> bool:
    """Whether a node may not be computed twice: its second result could be another one, or other ranks would wait for it."""
    if node.op != "call_function":
        return False
    if is_exchange(node):
        return True
    return must_stay(node) or bool(node.meta.get(SAVE)) or not _ONCE.isdisjoint(getattr(node.target, "tags", ()))


def _without_number(node: torch.fx.Node) -> torch.fx.Node:
    """A symbolic float is saved as the tensor that it is read from: to every compiler that is an input like any other."""
    is_float = isinstance(node.meta.get("val"), torch.SymFloat)
    return node.args[0] if is_float and node.target is torch.ops.aten._local_scalar_dense.default else node  # type: ignore[return-value]


def _without_tuple(node: torch.fx.Node) -> torch.fx.Node:
    if isinstance(node.meta.get("val"), (tuple, list)):
        raise AssertionError(f"{node.name} holds several tensors and cannot be saved as one value")
    return node


def _describe(node: torch.fx.Node) -> Descriptor:
    descriptor = node.meta.get("desc")
    return descriptor if isinstance(descriptor, Descriptor) else SavedForBackward(node.name)


def minimum_cut(
    read: Collection[torch.fx.Node],
    cost: Callable[[torch.fx.Node], int] | None = None,
    given: Collection[torch.fx.Node] = (),
) -> list[torch.fx.Node]:
    """The cheapest set of values from which all that the backward reads can be computed without expensive operators.

    ``cost`` says what it costs to keep a value: its bytes, unless given. Nodes that are ``given`` are inputs.
    """
    cost = cost or cost_of_keeping
    network: Any = networkx.DiGraph()
    relevant: set[torch.fx.Node] = set()
    stack = list(read)
    while stack:
        node = stack.pop()
        if node in relevant:
            continue
        relevant.add(node)
        network.add_edge((node.name, "out"), "sink") if node in read else None
        is_tuple = isinstance(node.meta.get("val"), (tuple, list))
        if is_tuple:
            network.add_edge((node.name, "in"), (node.name, "out"))
        else:
            network.add_edge((node.name, "in"), (node.name, "out"), capacity=cost(node))
        if node in given or node.op in ("placeholder", "get_attr") or (not _is_cheap(node) and not is_tuple):
            network.add_edge("source", (node.name, "in"))
            continue
        if is_tuple and not _is_cheap(node):
            # A tuple cannot be saved; its parts can, so the cut is moved to them.
            network.add_edge("source", (node.name, "in"))
            continue
        arguments = node.all_input_nodes
        if not arguments:
            network.remove_edge((node.name, "in"), (node.name, "out"))
            continue
        for argument in arguments:
            network.add_edge((argument.name, "out"), (node.name, "in"))
            stack.append(argument)
    if "source" not in network or "sink" not in network:
        return []
    _, (reachable, _) = networkx.minimum_cut(
        network, "source", "sink", flow_func=networkx.algorithms.flow.boykov_kolmogorov
    )
    return [
        node
        for node in relevant
        if (node.name, "in") in reachable
        and network.has_node((node.name, "out"))
        and (node.name, "out") not in reachable
        and network.has_edge((node.name, "in"), (node.name, "out"))
    ]


def cost_of_keeping(node: torch.fx.Node) -> int:
    """What a value weighs in the cut."""
    # Parameters and buffers are alive anyway; a view costs what its base costs, and is preferred less than the base.
    if isinstance(node.meta.get("desc"), (ParamInput, BufferInput)):
        return 1
    return 2 * value_bytes(node) + (0 if node.op == "placeholder" else 1)


def _extract(
    joint: JointGraph,
    inputs: list[torch.fx.Node],
    outputs: list[torch.fx.Node | None],
    order: list[torch.fx.Node],
    staying: list[torch.fx.Node],
) -> torch.fx.GraphModule:
    """The part of the graph that computes ``outputs`` and ``staying`` from ``inputs``, in the same order, with all metadata."""
    wanted: set[torch.fx.Node] = set()
    given = set(inputs)
    stack = [node for node in outputs if node is not None]
    stack += staying
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            if node not in given:
                stack.extend(node.all_input_nodes)
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in order:
        if node in wanted and node not in copies:
            if node.op == "placeholder":
                raise AssertionError(f"{node.name} is needed and is not among the inputs")
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
    graph.output([None if node is None else copies[node] for node in outputs])
    return private_tracing.lazy_graph_module(joint.graph_module, graph)


def tangent_positions(graph: torch.fx.GraphModule) -> list[int]:
    """Positions of the tangents among a graph's placeholders."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    return [position for position, node in enumerate(placeholders) if isinstance(node.meta.get("desc"), Tangent)]
