"""Sizes and scalars that autograd nodes have saved, as nodes of the graph under construction instead of values."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

#: Arithmetic and comparisons, by the names under which torch asks for them.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "int_floordiv": operator.floordiv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
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
#: Questions whose answers decide torch's next step.
_LOOKS = frozenset(
    {*(f"guard_{kind}" for kind in ("int", "float", "bool", "size_oblivious", "or_false", "or_true")), "bool_", "int_"}
)
#: Methods that make a plain number one among lifted ones.
_WRAPPERS = frozenset({"wrap_int", "wrap_float", "wrap_bool"})
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


@dataclass(eq=False)
class LiftedNumber:
    """A number of the graph under construction, with the methods that torch expects of the node of a ``SymInt``.

    Arithmetic with it becomes nodes of the graph. Code that asks for the value gets it, because the engine cannot stop half way,
    and ``looked_at`` is called with the question: the graph would be right for one value only.
    """

    graph: fx.Graph
    node: fx.Node | int | float
    kind: type
    value: Any
    looked_at: Callable[[str], None]

    def number(self) -> torch.SymInt | torch.SymFloat:
        """The ``SymInt`` or ``SymFloat`` around it."""
        return torch.SymInt(self) if self.kind is int else torch.SymFloat(self)

    def str(self) -> builtins.str:
        """Its text in messages of torch."""
        return str(self.node)

    def _graph_repr(self) -> Any:
        return self.str()

    def _lift(self, node: Any, value: Any) -> LiftedNumber:
        return LiftedNumber(self.graph, node, type(value), value, self.looked_at)

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
        if name in _WRAPPERS:
            return lambda value: self._lift(value, value)
        function = _FUNCTIONS.get(name)
        if function is None:
            if not name.startswith("_"):
                self.looked_at(name)
            raise AttributeError(name)

        def apply(*others: LiftedNumber) -> LiftedNumber:
            value = function(self.value, *(other.value for other in others))
            return self._lift(self.graph.call_function(function, tuple(item.node for item in (self, *others))), value)

        return apply
