"""Writes to memory that the same operator reads, or writes twice: eager refuses them, functionalisation does not notice.

The rules are those of torch's ``aten/src/ATen/MemoryOverlap.cpp``: a written tensor must not have elements that share memory,
and an operand that shares memory with it must lie exactly where it lies.
"""

from __future__ import annotations

import operator as builtin_operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace.overrides import WRITE_CHECKS, RefusedOperatorError
from dovetail.trace.trace import open_trace

#: Elements. Two tensors in a longer range of memory are taken to overlap where their ranges do.
_LONGEST_MAP = 1 << 24


def _shifted(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1:].add_(y[:-1])
    return y


def _written_twice(x: torch.Tensor) -> torch.Tensor:
    return x.clone().expand(3, 4).add_(1)


def _its_own_index(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.tensor([2, 1, 0])
    return x * 1, index.index_fill_(0, index, 0)


def _twice_in_a_list(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    torch.ops.aten._foreach_add_.Scalar([y, y], 1)
    return y


def _in_another_place_of_a_list(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, z = x * 1, x * 2
    torch.ops.aten._foreach_copy_.default([y, z], [z, y])
    return y, z


def _moved(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    z = torch.zeros(4)
    z.set_(x[1:])  # type: ignore[call-overload]
    z.add_(1)
    return x * 1, z.storage_offset()


def _part_of_expanded(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.expand(2, 3)[0].fill_(0.3)
    return y


def _expanded_to_its_own_size(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.expand(3).mul_(0.1)
    return y


@quirk(
    WRITE_CHECKS,
    example={
        "a part": lambda: Example(_part_of_expanded, [(torch.tensor([1e8, 1.0, float("inf")]),)], order=0),
        "all": lambda: Example(_expanded_to_its_own_size, [(torch.tensor([1e8, 1.0, float("inf")]),)], order=0),
    },
)
def write_through_expand(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a write to a view that ``expand`` has made, or to a part of it: functionalisation writes the sum of the differences
    back, which is rounded, and not a number where the memory held infinity.
    """
    for position, argument in enumerate(operator._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor) and any(map(_expands, _views_behind(item))):
                raise RefusedOperatorError(f"{operator} writes to a view made by expand", advice="clone it first")


def _views_behind(value: torch.Tensor) -> Iterator[torch.fx.Node]:
    """The view operators that have made a traced tensor, the last one first."""
    trace = open_trace()
    # A tensor that repeats its own elements is refused below.
    if trace is None or value.layout is not torch.strided or _repeats(value):
        return
    try:
        node: Any = trace.node_of(value)
    except CaptureError:
        # A constant of the program's.
        return
    while node.target is builtin_operator.getitem or private_operators.is_view(node.target):
        yield node
        node = node.all_input_nodes[0]


def _expands(node: torch.fx.Node) -> bool:
    is_strided = node.target is torch.ops.aten.as_strided.default
    return node.target is torch.ops.aten.expand.default or (is_strided and _repeats(node.meta["val"]))


def _repeats(value: torch.Tensor) -> bool:
    """Whether several elements share one place in memory, by a stride of 0."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return any(type(step) is int and step == 0 and size != 1 for size, step in pairs)


@quirk(
    WRITE_CHECKS,
    example={
        "an operand is shifted": lambda: Example(_shifted, [(torch.arange(5.0),)], order=0),
        "elements share memory": lambda: Example(_written_twice, [(torch.ones(4),)], order=0),
        "an index is written": lambda: Example(_its_own_index, [(torch.ones(4),)], order=0),
        "twice in a list": lambda: Example(_twice_in_a_list, [(torch.ones(4),)], order=0),
        "in another place of a list": lambda: Example(_in_another_place_of_a_list, [(torch.ones(4),)], order=0),
        "set_": lambda: Example(_moved, [(torch.ones(4),)], order=0),
    },
)
def overlapping_write(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse an operator that eager may refuse because of overlapping memory, so that eager decides."""
    schema = operator._schema
    if schema.name == "aten::set_":
        raise RefusedOperatorError("set_ makes a tensor lie in the memory of another one", advice="use copy_")
    operands: list[tuple[Any, bool, int | None]] = []
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        items = enumerate(value) if isinstance(value, (list, tuple)) else ((None, value),)
        operands += [
            (item, written, place)
            for place, item in items
            if isinstance(item, torch.Tensor) and item.layout is torch.strided
        ]
    # An operator not by elements may read an element that it has written: eager refuses it, or its result is undefined.
    jumps = operator.namespace == "aten" and torch.Tag.pointwise not in operator.tags
    # One by one, so that what a tensor of the list gets is read where the same memory comes again, later in it.
    in_turn = schema.name.startswith("aten::_foreach")
    jumps = jumps and not in_turn and not schema.name.startswith(("aten::copy_", "aten::resize"))
    for at, (target, written, place) in enumerate(operands):
        if not written:
            continue
        if _repeats(target):
            raise RefusedOperatorError(
                f"{operator} writes to a tensor of which several elements share one place in memory",
                advice="clone it first",
            )
        storage = target.untyped_storage()._cdata
        for other_at, (other, _, other_place) in enumerate(operands):
            if other_at == at or other.untyped_storage()._cdata != storage:
                continue
            adds_to = other_at == 0 and schema.name in _ADD_TO_THEIR_FIRST
            reads_written = (jumps and not adds_to) or (in_turn and place != other_place)
            if _overlap_partly(target, other) or (reads_written and _lie_alike(target, other)):
                raise RefusedOperatorError(
                    f"{operator} writes to memory that it also reads{'' if reads_written else ', at another place'}",
                    advice="clone the operand first",
                )


# Their first operand may be the result: ``addmm_`` is ``addmm`` with ``out=self``.
_ADD_TO_THEIR_FIRST = frozenset(f"aten::{name}" for name in ("addbmm", "addmm", "addmv", "addr", "baddbmm"))


def _lie_alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one storage begin at one place and have one shape: the same elements, if any."""
    return left is right or (left.storage_offset() == right.storage_offset() and left.shape == right.shape)


def _overlap_partly(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one storage share some of their memory but do not lie in the same way."""
    if left is right or left.numel() == 0 or right.numel() == 0:
        return False
    if left.dtype == right.dtype and _lie_alike(left, right):
        return left.stride() != right.stride()
    if left.dtype == right.dtype and _are_disjoint(left, right):
        return False
    spans = []
    for tensor in (left, right):
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        spans.append((start, start + (reach + 1) * tensor.element_size()))
    return bool(spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1])


def _are_disjoint(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether no element of one tensor is an element of the other, as with the borders of a padded tensor."""
    numbers = [(tuple(item.shape), item.stride(), item.storage_offset()) for item in (left, right)]
    if any(type(number) is not int for shape, stride, offset in numbers for number in (*shape, *stride, offset)):
        return _are_apart(left, right)
    first = min(offset for _, _, offset in numbers)
    ends = [
        offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        for shape, stride, offset in numbers
    ]
    if max(ends) - first >= _LONGEST_MAP:
        return False
    with private_tracing.disable_current_modes():
        taken = torch.zeros(max(ends) - first + 1, dtype=torch.bool)
        one, other = (taken.as_strided(shape, stride, offset - first) for shape, stride, offset in numbers)
        one.fill_(True)
        return not bool(other.any())


def _are_apart(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two boxes of one tensor with symbolic sizes have a dimension in which they lie apart.

    Offsets are taken apart into coordinates, as a number into its digits. That is unique where each stride reaches over all
    that lies within it. Every comparison becomes a guard.
    """
    strides = left.stride()
    if strides != right.stride() or any(private_sizes.is_data_number(size) for size in (*left.shape, *right.shape)):
        return False
    low, high = (left, right) if left.storage_offset() <= right.storage_offset() else (right, left)
    distance = high.storage_offset() - low.storage_offset()
    room: Any = None
    apart = False
    for dim, step in enumerate(strides):
        shift = distance // step if distance >= step else 0
        distance = distance - shift * step
        extent = low.shape[dim] if low.shape[dim] >= shift + high.shape[dim] else shift + high.shape[dim]
        if step <= 0 or (room is not None and extent * step > room):
            return False
        apart = apart or bool(shift >= low.shape[dim])
        room = step
    return apart and bool(distance == 0)
