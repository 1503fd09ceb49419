"""Sizes and scalars that autograd nodes have saved, while a backward is captured: known by name, never by value."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

#: Arithmetic that torch asks for by these names.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "int_floordiv": operator.floordiv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "and_": lambda left, right: left and right,
    "or_": lambda left, right: left or right,
    "sym_not": operator.not_,
}
#: Questions whose answer becomes a part of what torch does next.
_LOOKS = frozenset(
    {
        "guard_int",
        "guard_float",
        "guard_bool",
        "guard_size_oblivious",
        "guard_or_false",
        "guard_or_true",
        "bool_",
        "int_",
    }
)
#: Checks: the program is wrong where they fail, and nothing else depends on them.
_CHECKS = frozenset({"expect_true", "expect_size", "statically_known_true"})


class LiftedNumber:
    """A number in the graph under construction, in the shape that torch expects behind a ``SymInt``.

    Arithmetic with it becomes nodes of the graph. Whoever looks at its value gets it, because the engine cannot stop half way,
    and ``looked_at`` is told: such a graph would be right for one value only.
    """

    def __init__(
        self,
        graph: fx.Graph,
        node: fx.Node | int | float,
        kind: type,
        value: Any,
        looked_at: Callable[[str], None],
    ) -> None:
        self.graph = graph
        self.node = node
        self.kind = kind
        self.value = value
        self.looked_at = looked_at

    def number(self) -> torch.SymInt | torch.SymFloat:
        """The number as torch passes it around."""
        return torch.SymInt(self) if self.kind is int else torch.SymFloat(self)

    def is_int(self) -> bool:
        """Asked by torch."""
        return self.kind is int

    def is_float(self) -> bool:
        """Asked by torch."""
        return self.kind is float

    def is_bool(self) -> bool:
        """Asked by torch."""
        return self.kind is bool

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

    def maybe_as_bool(self) -> None:
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

    def _plain(self, value: Any, kind: type) -> LiftedNumber:
        return LiftedNumber(self.graph, value, kind, value, self.looked_at)

    def wrap_int(self, value: int) -> LiftedNumber:
        """A plain number among lifted ones."""
        return self._plain(value, int)

    def wrap_float(self, value: float) -> LiftedNumber:
        """A plain number among lifted ones."""
        return self._plain(value, float)

    def wrap_bool(self, value: bool) -> LiftedNumber:
        """A plain truth value among lifted ones."""
        return self._plain(value, bool)

    def clone(self) -> LiftedNumber:
        """Asked by torch."""
        return self

    def __getattr__(self, name: builtins.str) -> Any:
        if name in _CHECKS:
            return lambda *_: bool(self.value)
        if name in _LOOKS:
            self.looked_at(name)
            return lambda *_: self.value
        function = _ARITHMETIC.get(name) or _COMPARISONS.get(name)
        if function is None:
            if not name.startswith("_"):
                self.looked_at(name)
            raise AttributeError(name)

        def apply(*others: LiftedNumber) -> LiftedNumber:
            value = function(self.value, *(other.value for other in others))
            node = self.graph.call_function(function, (self.node, *(other.node for other in others)))
            return LiftedNumber(self.graph, node, type(value), value, self.looked_at)

        return apply
