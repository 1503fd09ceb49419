"""Nodes of a joint graph: marks in their ``meta``, and questions that several stages ask about them.

A node's ``meta`` holds ``val`` (its fake value), ``phase`` ("forward" or "backward"), ``desc`` (of a placeholder: its descriptor),
``user_line`` (a :class:`dovetail.errors.UserLocation`) and, where they apply, the marks below.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from dovetail.aot.descriptors import BufferInput, ParamInput
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.overrides import ASSUMES

IN_BACKWARD = "checkpointed"
"""A mark: the node is computed in the backward, though it needs no tangent (regions of ``torch.utils.checkpoint``)."""
SAVE = "save"
"""A mark: the forward saves the value; it is never computed again."""
BY_USER_BACKWARD = "user_backward"
"""A mark: a hook, or the backward of a custom ``autograd.Function``, has computed the node."""
GIVEN_TO = "given_to"
"""A mark of incoming gradients: the custom backwards, each with the place of an argument, that are given what comes from them."""
TAKES_WHOLE_GRADIENT = "whole_gradient"
"""A mark: a hook or custom backward, which is not linear in its gradient, has computed the node."""
BACKWARD_RUN = "in_backward"
"""A mark: the number of the run of autograd's engine, inside of the captured function, that has computed the node."""

_ASSERTIONS = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg)
#: Operators that stay though nothing reads what they give, if anything. Rules add more.
STAYING: set[Any] = {torch.ops.aten._linalg_check_errors.default, *_ASSERTIONS}


def must_stay(node: torch.fx.Node) -> bool:
    """Whether a node stays even if unused: it draws random numbers (the generator moves as in eager) or raises errors."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    return node.target in STAYING or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def checks_assumption(node: torch.fx.Node) -> bool:
    """Whether a node raises where the data of a call differs from what the graph was captured for."""
    may_refuse = ASSUMES.get(node.target)
    return node.target in _ASSERTIONS or (may_refuse is not None and may_refuse(node))


def writes_in_place(node: torch.fx.Node) -> bool:
    """Whether a node's operator writes to one of its arguments."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def tensor_of(node: torch.fx.Node | None) -> torch.Tensor | None:
    """The fake tensor that a node stands for; None for numbers, tuples and missing nodes."""
    value = None if node is None else node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def memory_of(node: torch.fx.Node | None) -> int | None:
    """A key of the memory that a node's tensor lies in, which views share; None without one."""
    value = tensor_of(node)
    return None if value is None or value.layout is not torch.strided else int(value.untyped_storage()._cdata)


def has_symbolic_sizes(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether the value of any of these nodes has a symbolic size, or is a symbolic number."""
    return any(private_sizes.has_symbols(node.meta.get("val")) for node in nodes)


def depending_on(nodes: Iterable[torch.fx.Node], starts: Collection[torch.fx.Node]) -> set[torch.fx.Node]:
    """``starts``, and those of ``nodes`` (in the order of their graph) that are computed from them."""
    found = set(starts)
    for node in nodes:
        if any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found


def needed_for(
    nodes: Iterable[torch.fx.Node | None], given: Collection[torch.fx.Node] = frozenset()
) -> set[torch.fx.Node]:
    """These nodes and all that they are computed from; ``given`` are nodes whose values are there already."""
    found: set[torch.fx.Node] = set()
    stack = [node for node in nodes if node is not None]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node not in given:
                stack += node.all_input_nodes
    return found


def kept_anyway(graph: torch.fx.Graph) -> frozenset[int]:
    """The memory of parameters and buffers, which outlives every call: to save one, or a view of one, costs nothing."""
    placeholders = graph.find_nodes(op="placeholder")
    found = [memory_of(node) for node in placeholders if isinstance(node.meta.get("desc"), (ParamInput, BufferInput))]
    return frozenset(key for key in found if key is not None)


def memory_kept_by(node: torch.fx.Node, free: frozenset[int]) -> tuple[int, int] | None:
    """The memory that a saved node keeps alive, by its key, and its bytes; None where that is ``free`` (:func:`kept_anyway`)."""
    value, key = tensor_of(node), memory_of(node)
    if value is None or key is None or key in free:
        return None
    return key, private_sizes.hint(value.untyped_storage().nbytes())


def saved_bytes(saved: Collection[torch.fx.Node]) -> int:
    """Bytes that saving these nodes keeps alive, each memory once; parameters and buffers do not count."""
    if not saved:
        return 0
    free = kept_anyway(next(iter(saved)).graph)
    return sum(dict(found for node in saved if (found := memory_kept_by(node, free)) is not None).values())
