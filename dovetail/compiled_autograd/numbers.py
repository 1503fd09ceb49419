"""Sizes and scalars that autograd nodes have saved, while a backward is captured: known by name, never by value."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dovetail import torch_private_autograd as door
from dovetail.errors import CaptureError

_BINARY: dict[str, tuple[Callable[..., Any], bool]] = {
    # name that torch asks for: function, and whether the operands come in the other order
    "add": (operator.add, False),
    "sub": (operator.sub, False),
    "mul": (operator.mul, False),
    "int_floordiv": (operator.floordiv, False),
    "floordiv": (operator.floordiv, False),
    "mod": (operator.mod, False),
}


class LiftedNumber:
    """A number in the graph under construction, in the shape that torch expects behind a ``SymInt``.

    Arithmetic with it becomes nodes of the graph. Whatever would need its value raises :class:`CaptureError`: such a graph
    would be right for one value only.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node | int | float, kind: type) -> None:
        self.graph = graph
        self.node = node
        self.kind = kind

    def number(self) -> torch.SymInt | torch.SymFloat:
        """The number as torch passes it around."""
        return door.symbolic_integer(self) if self.kind is int else door.symbolic_float(self)

    def is_int(self) -> bool:
        """Asked by torch."""
        return self.kind is int

    def is_float(self) -> bool:
        """Asked by torch."""
        return self.kind is float

    def is_bool(self) -> bool:
        """Asked by torch."""
        return False

    def is_symbolic(self) -> bool:
        """Asked by torch."""
        return True

    def is_nested_int(self) -> bool:
        """Asked by torch."""
        return False

    def is_constant(self) -> bool:
        """Asked by torch."""
        return False

    def maybe_as_int(self) -> None:
        """Asked by torch: the value, if it can never be another one."""
        return None

    def maybe_as_float(self) -> None:
        """Asked by torch: the value, if it can never be another one."""
        return None

    def constant_int(self) -> None:
        """Asked by torch: the value, if it can never be another one."""
        return None

    def nested_int(self) -> None:
        """Asked by torch: which ragged size it is."""
        return None

    def has_hint(self) -> bool:
        """Asked by torch."""
        return False

    def str(self) -> builtins.str:
        """How torch prints it."""
        return str(self.node)

    def _graph_repr(self) -> Any:
        return self.str()

    def wrap_int(self, value: int) -> LiftedNumber:
        """A plain number among lifted ones."""
        return LiftedNumber(self.graph, value, int)

    def wrap_float(self, value: float) -> LiftedNumber:
        """A plain number among lifted ones."""
        return LiftedNumber(self.graph, value, float)

    def clone(self) -> LiftedNumber:
        """Asked by torch."""
        return self

    def __getattr__(self, name: builtins.str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _BINARY:
            function, reverse = _BINARY[name]

            def apply(other: LiftedNumber) -> LiftedNumber:
                operands = (other.node, self.node) if reverse else (self.node, other.node)
                kind = float if float in (self.kind, other.kind) else int
                return LiftedNumber(self.graph, self.graph.call_function(function, operands), kind)

            return apply
        raise CaptureError(f"torch looks at a saved size or number ({name}) while the backward is captured")


def lifted_node(value: Any) -> fx.Node | int | float:
    """The graph's node of a number; raises :class:`CaptureError` for a number from elsewhere."""
    number = value.node
    if not isinstance(number, LiftedNumber):
        raise CaptureError("an autograd node has saved a symbolic number of another trace")
    return number.node
