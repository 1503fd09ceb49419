"""Written inputs and shared memory of a graph, from the operators' schemas and the storages of fake values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import trees as private_trees

#: Targets without a schema that write nothing: they take numbers, or pick from a result.
_PURE_FUNCTIONS = frozenset(
    {
        operator.getitem,
        *(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pow", "abs")),
        *(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_")),
        torch.sym_int,
        torch.sym_float,
        torch.sym_not,
        torch.sym_max,
        torch.sym_min,
        torch.sym_ite,
        torch.sym_sqrt,
    }
)
_CALLS = ("call_function", "call_method", "call_module")
#: Operators whose results lie in the memory of their arguments, though their schemas do not say so.
_UNDECLARED_VIEWS = frozenset({torch.ops.aten._unsafe_view.default})


def nodes_in(value: Any) -> Iterator[torch.fx.Node]:
    """Return all nodes in an argument, also those in lists, tuples, dictionaries and slices."""
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(value, found.append)
    return iter(found)


def is_pure_function(target: Any) -> bool:
    """Return whether a target that is no operator overload is known to write to nothing."""
    try:
        return target in _PURE_FUNCTIONS
    except TypeError:
        return False


def written_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that a node writes to by its operator's schema; all arguments if there is no schema.

    Tensors in lists and nested arguments count.
    """
    if node.op not in _CALLS:
        return []
    if not isinstance(node.target, private_operators.OpOverload):
        return [] if is_pure_function(node.target) else list(nodes_in((node.args, node.kwargs)))
    return [value for is_write, value in _aliased_arguments(node) if is_write]


def _may_share_memory(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments whose memory a node's result may be part of."""
    if node.op not in _CALLS:
        return []
    target = node.target
    everything = list(nodes_in((node.args, node.kwargs)))
    if not isinstance(target, private_operators.OpOverload):
        return everything if target is operator.getitem or not is_pure_function(target) else []
    if private_libraries.is_implicit(target) or target in _UNDECLARED_VIEWS:
        # The result of reshape, contiguous or to may be a view or not, and the schema does not say.
        return everything
    if not any(item.alias_info is not None for item in target._schema.returns):
        return []
    return [value for _, value in _aliased_arguments(node)]


def _aliased_arguments(node: torch.fx.Node) -> Iterator[tuple[bool, torch.fx.Node]]:
    """Yield the nodes in arguments that the schema says are written to (True), or share memory with the result."""
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is not None:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            for found in nodes_in(value):
                yield argument.alias_info.is_write, found


class Memory:
    """Groups of nodes that may share memory (a union-find over a graph)."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        self._parent: dict[torch.fx.Node, torch.fx.Node] = {}
        # Storages stay alive here: an address that was freed and used again would join unrelated nodes.
        self._storages: list[Any] = []
        by_storage: dict[Any, torch.fx.Node] = {}
        for node in graph.graph.nodes:
            for other in _may_share_memory(node):
                self._join(node, other)
            value = node.meta.get("val")
            for leaf in private_trees.tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    storage = leaf.untyped_storage()
                    self._storages.append(storage)
                    self._join(node, by_storage.setdefault(private_libraries.storage_key(storage), node))

    def group(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the node that represents all nodes that may share memory with this one."""
        root = node
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        self._parent[node] = root
        return root

    def groups(self, values: Iterable[Any]) -> set[torch.fx.Node]:
        """Return the groups of those values that are nodes."""
        return {self.group(value) for value in values if isinstance(value, torch.fx.Node)}

    def _join(self, one: torch.fx.Node, other: torch.fx.Node) -> None:
        first, second = self.group(one), self.group(other)
        if first is not second:
            self._parent[first] = second


def mutated_inputs(graph: torch.fx.GraphModule) -> frozenset[int]:
    """Return the indices of the placeholders that a run of the graph may write to."""
    memory = Memory(graph)
    written = memory.groups(value for node in graph.graph.nodes for value in written_arguments(node))
    placeholders = graph.graph.find_nodes(op="placeholder")
    return frozenset(index for index, node in enumerate(placeholders) if memory.group(node) in written)
