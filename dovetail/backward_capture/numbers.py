"""Sizes and scalars that autograd nodes have saved, as nodes of the graph under construction instead of values."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

#: Arithmetic, by the names under which torch asks for it.
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
#: Questions whose answers decide what torch does next.
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
_KINDS = {"is_int": int, "is_float": float, "is_bool": bool}
#: Plain answers, by the names of the questions.
_ANSWERS: dict[str, bool | None] = {
    "is_symbolic": True,
    "is_nested_int": False,
    "is_constant": False,
    "has_hint": False,
    # Its value, if it could never have another one.
    "maybe_as_int": None,
    "maybe_as_float": None,
    "maybe_as_bool": None,
    "constant_int": None,
    "nested_int": None,
}
#: Checks: where one fails the program is wrong, and nothing else depends on it.
_CHECKS = frozenset({"expect_true", "expect_size", "statically_known_true"})


class LiftedNumber:
    """A number of the graph under construction, with the methods that torch expects of the node of a ``SymInt``.

    Arithmetic with it becomes nodes of the graph. Code that asks for the value gets it, because the engine cannot stop half way,
    and ``looked_at`` is called with the question: the graph would be right for one value only.
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
        """The ``SymInt`` or ``SymFloat`` around it."""
        return torch.SymInt(self) if self.kind is int else torch.SymFloat(self)

    def str(self) -> builtins.str:
        """Its text in messages of torch."""
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
        """Itself: nothing changes it."""
        return self

    def __getattr__(self, name: builtins.str) -> Any:
        """The methods by which torch asks about the number, computes with it, and looks at its value."""
        if name in _ANSWERS:
            return lambda: _ANSWERS[name]
        if name in _KINDS:
            return lambda: self.kind is _KINDS[name]
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
