"""Backward graphs for some of the tangents only.

Autograd's engine does not propagate an undefined gradient: it is not a tensor of zeros, and an infinity on its way does not
turn it into NaN. A first-order backward is linear in its tangents, so a node all of whose tangent-dependent arguments are
zero is zero itself; a sum with a zero is the other summand; where one of several arguments is zero, zeros are made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.aot.sizes_in_graph import size_in_graph
from dovetail.torch_private import sizes as private_sizes

_SUMS = (torch.ops.aten.add.Tensor,)

# Marks in a node's ``meta``, for gradients that are packed into one tensor and taken out again.
PACK = "pack"
"""A mark: the node's first argument is the list of the gradients that it packs."""
MEMBER = "member"
"""A mark: the node is the gradient that was packed at this place of the list; where that is zero, there is no gradient."""
FOR_PATTERN = "for_pattern"
"""A mark: ``function(args, defined)`` gives the node's arguments in a backward for some of the tangents."""


def overlaps_itself(output: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, as windows that overlap do: no gradient can be laid out like it.

    >>> overlaps_itself(torch.ones(4).as_strided((3, 2), (1, 1))), overlaps_itself(torch.ones(3, 2).t())
    (True, False)
    """
    hint, reach = private_sizes.hint, 0
    for stride, size in sorted(
        (hint(step), hint(size)) for step, size in zip(output.stride(), output.shape, strict=True)
    ):
        if size > 1 and stride <= reach:
            return True
        reach += max(size - 1, 0) * stride
    return False


def specialise_tangents(
    backward: torch.fx.GraphModule, positions: Sequence[int], defined: Sequence[bool]
) -> tuple[torch.fx.GraphModule, list[int]]:
    """A backward graph without the placeholders of undefined tangents, and the positions of inputs that are no longer used.

    ``positions`` are those of the tangents among the placeholders, ``defined`` says which of them there are. Unused inputs
    are removed from the graph as well; a gradient that is zero becomes None in the outputs.
    """
    placeholders = backward.graph.find_nodes(op="placeholder")
    tangents = [placeholders[position] for position in positions]
    copy = _Copy(tangents, defined)
    for node in backward.graph.nodes:
        copy.add(node)
    copy.graph.eliminate_dead_code()
    unused = []
    for position, node in enumerate(placeholders):
        if position not in positions and not copy.new[node].users:
            copy.graph.erase_node(copy.new[node])
            unused.append(position)
    return torch.fx.GraphModule(backward, copy.graph), unused


class _Copy:
    """A copy of a backward graph; ``zero`` are the nodes of the original that no defined tangent reaches."""

    def __init__(self, tangents: Sequence[torch.fx.Node], defined: Sequence[bool]) -> None:
        self.graph = torch.fx.Graph()
        self.new: dict[torch.fx.Node, torch.fx.Node] = {}
        self._defined = tuple(defined)
        self._zero = {node for node, flag in zip(tangents, defined, strict=True) if not flag}
        self._dependent = set(tangents)
        self._with_zeros: set[torch.fx.Node] = set()
        self._has_other_strides = False

    def add(self, node: torch.fx.Node) -> None:
        """Copy the next node, if there is anything left of it."""
        if node.op == "placeholder":
            if node not in self._zero:
                self.new[node] = self.graph.placeholder(node.name)
                self.new[node].meta = dict(node.meta)
        elif node.op == "output":
            (results,) = node.meta.get(FOR_PATTERN, lambda args, _: args)(node.args, self._defined)
            is_left = [item is not None and not self._is_left_out(item) for item in results]
            self.graph.output([self._argument(item) if flag else None for item, flag in zip(results, is_left)])
        else:
            self._add_operator(node)

    def _add_operator(self, node: torch.fx.Node) -> None:
        inputs = [item for item in node.all_input_nodes if item in self._dependent]
        missing = [item for item in inputs if item in self._zero]
        if inputs:
            self._dependent.add(node)
            if len(missing) == len(inputs):
                self._zero.add(node)
                # Another term of a sum can only be zeros: those of ``round()``, say.
                has_more = node.target in _SUMS and len(node.all_input_nodes) > len(inputs)
                self._with_zeros.update([node] if has_more or not self._with_zeros.isdisjoint(inputs) else ())
                return
        if missing and node.target in _SUMS and not node.kwargs and len(node.args) == 2:
            (other,) = [item for item in node.args if item not in missing] or [None]
            if isinstance(other, torch.fx.Node) and _is_alike(other, node):
                self.new[node] = self.new[other]
                self._has_other_strides |= other.meta["val"].stride() != node.meta["val"].stride()
                return
        copied = self.new[node] = self.graph.node_copy(node, self._argument)
        if self._has_other_strides and inputs and node.target is torch.ops.aten.view.default:
            # A sum may have had other strides than its one summand. Eager's formulas reshape.
            copied.target = torch.ops.aten.reshape.default
        if FOR_PATTERN in node.meta:
            copied.args = node.meta[FOR_PATTERN](copied.args, self._defined)
        copied.meta = dict(node.meta)

    def _argument(self, node: torch.fx.Node) -> torch.fx.Node:
        if node not in self._zero:
            return self.new[node]
        value = node.meta["val"]
        sizes = [size_in_graph(self.graph, size, list(self.new.values())) for size in value.shape]
        made = self.graph.call_function(
            torch.ops.aten.full.default, (sizes, 0), {"dtype": value.dtype, "device": value.device}
        )
        made.meta = {"val": value.new_zeros(value.shape), "phase": "backward"}
        return made

    def _is_left_out(self, node: torch.fx.Node) -> bool:
        if node in self._zero or MEMBER not in node.meta:
            return node in self._zero and node not in self._with_zeros
        pack = node
        while PACK not in pack.meta:
            pack = pack.all_input_nodes[0]
        members: Any = pack.args[0]
        return members[node.meta[MEMBER]] in self._zero


def _is_alike(left: torch.fx.Node, right: torch.fx.Node) -> bool:
    a, b = left.meta["val"], right.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.device == b.device)
