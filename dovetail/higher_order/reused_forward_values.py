"""Reuse saved activations in higher-order graphs.

The graph of the next order replays the program, so it begins with the forward's own operators. Where one of them is, operator for
operator and input for input, one whose result the forward keeps for its backward, that result is handed in as one more input.
It saves time only, so the core knows nothing of it but that a graph may have further inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.descriptors import Descriptor, SavedForBackward
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import BY_USER_BACKWARD, IN_BACKWARD, tensor_of
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
#: A part of a result, and arithmetic of sizes.
_PLAIN_TARGETS = {operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod}


class _NoKeyError(Exception):
    """A node that is not compared."""


@dataclass(frozen=True, eq=False)
class EarlierOrder:
    """The order before: its joint graph as it was compiled, the values ``saved`` for its backward, in their order (None for one
    that is not there), and which of its inputs (``primals``) the first inputs of the next order are.
    """

    joint: JointGraph
    saved: tuple[Descriptor | None, ...]
    primals: tuple[int, ...]


def find_reused(earlier: EarlierOrder, joint: JointGraph) -> dict[torch.fx.Node, int]:
    """The nodes of the next order's graph whose values are saved, and where among the saved values they are."""
    known, numbers = _numbered(earlier.joint)
    names = {node.name: node for node in earlier.joint.graph.nodes}
    places: dict[int, tuple[int, torch.fx.Node]] = {}
    for place, descriptor in enumerate(earlier.saved):
        if isinstance(descriptor, SavedForBackward):
            node = names.get(descriptor.name)
            if node is not None and node in numbers:
                places.setdefault(numbers[node], (place, node))
    before = earlier.joint.graph.find_nodes(op="placeholder")
    inputs = joint.graph.find_nodes(op="placeholder")[: len(earlier.primals)]
    sizes = _sizes_of_inputs(inputs, [before[index] for index in earlier.primals])
    same = {
        node: index
        for node, index in zip(inputs, earlier.primals, strict=True)
        if _is_alike(node, before[index], sizes)
    }
    found: dict[torch.fx.Node, int] = {}
    for node in joint.graph.nodes:
        key = None if _computes_again(node) else _key(node, same)
        twin = None if key is None else known.get(key)
        if twin is None:
            continue
        same[node] = numbers[twin]
        saved = places.get(numbers[twin])
        if saved is not None and _is_alike(node, saved[1], sizes):
            found[node] = saved[0]
    return found


def _computes_again(node: torch.fx.Node) -> bool:
    """Whether a formula computes a value of its own, which does not see the program's writes to an equal one."""
    returns = getattr(node.target, "_schema", None) and node.target._schema.returns  # type: ignore[union-attr]
    return node.meta.get("phase") == "backward" and not any(item.alias_info for item in returns or ())


def _numbered(joint: JointGraph) -> tuple[dict[Hashable, torch.fx.Node], dict[torch.fx.Node, int]]:
    """The nodes of a graph by their computation, and a number for each: equal computations have equal numbers."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    numbers = {node: index for index, node in enumerate(placeholders[: joint.num_primals])}
    known: dict[Hashable, torch.fx.Node] = {}
    for node in joint.graph.nodes:
        key = _key(node, numbers)
        if key is not None:
            first = known.setdefault(key, node)
            numbers[node] = numbers.setdefault(first, len(placeholders) + len(numbers))
    return known, numbers


def _key(node: torch.fx.Node, numbers: Mapping[torch.fx.Node, int]) -> Hashable | None:
    """The operator and the inputs of a node; None for a node that is not compared."""
    target = node.target
    if node.op != "call_function" or node.meta.get(IN_BACKWARD) or node.meta.get(BY_USER_BACKWARD):
        return None
    if isinstance(target, private_operators.OpOverload):
        # Random operators stay: without them, later ones would draw other numbers.
        if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            return None
    elif target not in _PLAIN_TARGETS:
        return None
    try:
        return (target, _frozen(node.args, numbers), _frozen(node.kwargs, numbers))
    except _NoKeyError:
        return None


def _frozen(value: Any, numbers: Mapping[torch.fx.Node, int]) -> Hashable:
    if isinstance(value, torch.fx.Node):
        number = numbers.get(value)
        if number is None:
            raise _NoKeyError
        return ("node", number)
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(item, numbers) for item in value])
    if isinstance(value, Mapping):
        return tuple([(key, _frozen(item, numbers)) for key, item in sorted(value.items())])
    if not isinstance(value, _PLAIN):
        raise _NoKeyError
    # By its text: 1 and 1.0, or 0.0 and -0.0, are equal.
    return (type(value), repr(value))


def _sizes_of_inputs(inputs: Sequence[torch.fx.Node], before: Sequence[torch.fx.Node]) -> dict[Any, Any]:
    """The symbols of the next order's sizes in terms of those of the order before, of which it takes the same inputs."""
    found: dict[Any, Any] = {}
    for pair in zip(inputs, before, strict=True):
        one, other = map(tensor_of, pair)
        if one is None or other is None or not (one.layout is other.layout is torch.strided):
            continue
        for size, known in zip((*one.shape, *one.stride()), (*other.shape, *other.stride()), strict=False):
            expression = private_sizes.expression_of(size)
            if private_sizes.is_symbol(expression):
                found.setdefault(expression, private_sizes.expression_of(known))
    return found


def _is_alike(one: torch.fx.Node, other: torch.fx.Node, sizes: Mapping[Any, Any]) -> bool:
    """Whether two values are laid out alike in memory; ``sizes`` translates the symbols of the first one."""
    first, second = tensor_of(one), tensor_of(other)
    if first is None or second is None:
        return False
    if not (first.layout is second.layout is torch.strided) or first.dim() != second.dim():
        return False
    return (
        (first.dtype, first.device) == (second.dtype, second.device)
        and (first.is_conj(), first.is_neg()) == (second.is_conj(), second.is_neg())
        and all(_is_same_size(size, known, sizes) for size, known in zip(first.shape, second.shape, strict=True))
        and all(_is_same_size(step, known, sizes) for step, known in zip(first.stride(), second.stride(), strict=True))
    )


def _is_same_size(size: Any, known: Any, sizes: Mapping[Any, Any]) -> bool:
    expression = private_sizes.expression_of(size)
    symbols = private_sizes.symbols_of(expression)
    if not symbols:
        return bool(expression == private_sizes.expression_of(known))
    return all(symbol in sizes for symbol in symbols) and bool(
        expression.xreplace(sizes) == private_sizes.expression_of(known)
    )
