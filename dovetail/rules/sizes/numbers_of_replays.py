"""Sizes and numbers that are made of data, where a program is replayed for a derivative of the next order.

``torch.unique``, ``torch.bincount`` or ``.item()`` give another number with other data. A replay reads it where the program has got
it: off the sizes of a tensor that a call has returned, or out of a tensor with one element.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace.program import LATE_NUMBERS, Recorder
from dovetail.trace.trace import Trace, open_trace

_ITEM = torch.ops.aten._local_scalar_dense.default
Read = Callable[[Mapping[Any, Any]], Any]


def late_number(recorder: Recorder, number: Any) -> Read | None:
    """The function by which a replay reads a number that depends on data; None for other numbers, and where nobody knows."""
    trace = open_trace()
    if trace is None or trace.recorder is not recorder or not private_sizes.is_data_number(number):
        return None
    expression = private_sizes.expression_of(number)
    symbols = private_sizes.symbols_of(expression)
    places = [_place(trace, symbol) for symbol in symbols]
    if None in places:
        return None
    names = {symbol: f"v{index}" for index, symbol in enumerate(symbols)}
    text = private_sizes.python_text(expression, names)
    compute = eval(f"lambda {', '.join(names.values())}: {text}", private_sizes.python_text_globals())

    def read(values: Mapping[Any, Any]) -> Any:
        return compute(*[_read(values[slot], dim) for slot, dim in filter(None, places)])

    return read


def _read(value: torch.Tensor, dim: int | None) -> Any:
    return value.item() if dim is None else value.shape[dim]


class _Places:
    """Where the symbols of one trace are found: each tensor and each node is looked at once."""

    def __init__(self) -> None:
        self._tensors, self._sizes = 0, dict[Any, tuple[int, int]]()
        self._nodes, self._items = 0, dict[Any, torch.fx.Node]()

    def size(self, tensors: Sequence[torch.Tensor], symbol: Any) -> tuple[int, int] | None:
        """The slot and the dimension of the first tensor that has this size."""
        for slot, tensor in enumerate(tensors[self._tensors :], self._tensors):
            for dim, size in enumerate(tensor.shape):
                if private_sizes.is_symbolic(size):
                    self._sizes.setdefault(private_sizes.first_expression(size), (slot, dim))
        self._tensors = len(tensors)
        found = self._sizes.get(symbol)
        if found is not None and not _is(tensors[found[0]].shape[found[1] : found[1] + 1], symbol):
            # It was resized in place since.
            self._tensors, self._sizes = 0, {}
            return self.size(tensors, symbol)
        return found

    def item(self, graph: torch.fx.Graph, symbol: Any) -> torch.fx.Node | None:
        """The node that reads this number out of a tensor."""
        nodes = graph.find_nodes(op="call_function", target=_ITEM, sort=False)
        for node in nodes[self._nodes :]:
            value = node.meta.get("val")
            if private_sizes.is_symbolic(value):
                self._items[private_sizes.first_expression(value)] = node
        self._nodes = len(nodes)
        return self._items.get(symbol)


_PLACES: weakref.WeakKeyDictionary[Trace, _Places] = weakref.WeakKeyDictionary()


def _is(numbers: Sequence[Any], symbol: Any) -> bool:
    return any(private_sizes.is_symbolic(item) and private_sizes.first_expression(item) == symbol for item in numbers)


def _place(trace: Trace, symbol: Any) -> tuple[int, int | None] | None:
    """The slot of a tensor, and the dimension that has this size; None for its one element."""
    tensors, places = trace.recorder.tensors, _PLACES.setdefault(trace, _Places())
    found = places.size(tensors, symbol)
    node = places.item(trace.graph, symbol) if found is None else None
    if node is None:
        return found
    # A tensor that was written to since is another node. From the end: a number is mostly used soon after it was read.
    slots = (slot for slot in reversed(range(len(tensors))) if _node_of(trace, tensors[slot]) is node.args[0])
    return next(((slot, None) for slot in slots), None)


def _node_of(trace: Trace, tensor: torch.Tensor) -> torch.fx.Node | None:
    if not private_tensors.is_traced(tensor):
        # A constant, as of torch.Tensor([10.0]).
        return None
    try:
        return trace.node_of(tensor)
    except CaptureError:
        return None


LATE_NUMBERS.append(late_number)
