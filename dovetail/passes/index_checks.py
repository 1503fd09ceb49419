"""Indices that a call is given, asked before a graph that writes to its inputs itself: a whole step, or an inference.

An index out of range is found when the operator runs. Eager has done by then what the program does before it, and nothing
behind it. A graph that writes as it goes has written something else, in any order, so that the call cannot be made again.
Indices that are inputs (ids of tokens, labels, actions) can be asked first, where that waits for no device; with a bad one
the call is eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.nodes import tensor_of
from dovetail.aot.steps import Lowering, asks_data

_aten = torch.ops.aten

# The operators that take a tensor, a dimension and indices along it; those whose indices are along the first one.
_ALONG = {getattr(_aten, name) for name in ["index_select", "gather", "scatter", "scatter_add", "scatter_reduce"]}
_ALONG |= {_aten.index_add, _aten.index_copy, _aten.index_fill}
_FIRST = {_aten.embedding, _aten._embedding_bag, _aten._embedding_bag_forward_only}
_ITEMS = {_aten.index, _aten.index_put}
# They take scores, labels, weights, a reduction and the label that is ignored.
_LOSSES = {_aten.nll_loss_forward, _aten.nll_loss2d_forward}
# They give the same elements in another shape or type.
_SAME = {
    getattr(_aten, name)
    for name in ["view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "t", "permute", "transpose"]
}
_SAME |= {_aten.alias, _aten.detach, _aten.clone, _aten._to_copy, torch.ops.prims.convert_element_type}


@dataclass(frozen=True)
class Bounds:
    """The bounds of the elements of an input: from ``low`` up to ``high`` (without it), or ``ignored``."""

    place: int
    low: int
    high: int
    ignored: int | None

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all elements lie within them."""
        value = tensors[self.place]
        if not value.numel():
            return True
        low, high = (number.item() for number in torch.aminmax(value))
        if self.low <= low and high < self.high:
            return True
        return self.ignored is not None and bool(
            ((value == self.ignored) | ((value >= self.low) & (value < self.high))).all()
        )


@asks_data
def ask_indices(lowering: Lowering) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    """The question for a graph that writes, or drops gradients, before it is through."""
    joint = lowering.joint
    if joint.provenance or not (lowering.write_backs or lowering.gradients_dropped_first):
        return None
    places = {node: place for place, node in enumerate(joint.primals)}
    found = set()
    for node in joint.graph.nodes:
        for indices, low, high, ignored in _asked_of(node):
            index, left_out = _origin(indices)
            if index in places and _is_asked_cheaply(index):
                found.add(Bounds(places[index], low, high, ignored if left_out is None else left_out))
    if not found:
        return None

    def fits(tensors: Sequence[torch.Tensor]) -> bool:
        with torch.no_grad():
            return all(item.hold(tensors) for item in found)

    return fits


def _asked_of(node: torch.fx.Node) -> Iterator[tuple[Any, int, int, int | None]]:
    """The indices that an operator takes, with their bounds."""
    operator, args = getattr(node.target, "overloadpacket", None), (*node.args, None, None)
    if operator in _ALONG:
        yield from _range(args[0], args[1], args[2])
    elif operator in _FIRST:
        yield from _range(args[0], 0, args[1])
    elif operator in _LOSSES and len(node.args) == 5:
        yield from _range(args[0], 0 if len(_shape(args[0])) == 1 else 1, args[1], ignored=args[4])
    elif operator in _ITEMS:
        for dimension, indices in enumerate(args[1]):  # type: ignore[arg-type]
            if indices is not None:
                yield from _range(args[0], dimension, indices, negative=True)


def _shape(node: Any) -> Sequence[Any]:
    value = tensor_of(node) if isinstance(node, torch.fx.Node) else None
    return () if value is None else value.shape


def _range(
    tensor: Any, along: Any, indices: Any, *, negative: bool = False, ignored: Any = None
) -> Iterator[tuple[Any, int, int, int | None]]:
    shape = _shape(tensor)
    length = shape[along] if type(along) is int and shape else None
    if type(length) is int:
        yield indices, -length if negative else 0, length, ignored


def _origin(node: Any) -> tuple[Any, int | None]:
    """The node whose elements these are, and the element that another one takes the place of (an ignored label)."""
    ignored = None
    while isinstance(node, torch.fx.Node):
        operator = getattr(node.target, "overloadpacket", None)
        if operator is _aten.where and ignored is None and getattr(node.args[0], "target", None) is _aten.ne.Scalar:
            compared, number = node.args[0].args  # type: ignore[union-attr]
            if node.args[1] is not compared or type(number) is not int:
                break
            node, ignored = compared, number
        elif operator in _SAME:
            node = node.args[0]
        else:
            break
    return node, ignored


def _is_asked_cheaply(node: torch.fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.device.type == "cpu" and value.dtype in (torch.int64, torch.int32)
