"""Sizes computed by nodes of a graph, and the functions that expressions over symbolic sizes consist of."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.torch_private import sizes as private_sizes

MAXIMUM_EXPONENT = 8


def power(base: Any, exponent: Any) -> Any:
    """A small power, by multiplication; raises ValueError for another exponent."""
    if not isinstance(exponent, int) or not 0 <= exponent <= MAXIMUM_EXPONENT:
        raise ValueError(f"the exponent {exponent} of a size is no whole number from 0 to {MAXIMUM_EXPONENT}")
    return functools.reduce(operator.mul, [base] * exponent, 1)


def _fold(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *items: functools.reduce(function, items)


SIZE_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Add": _fold(operator.add),
    "Mul": _fold(operator.mul),
    "Pow": power,
    **dict.fromkeys(("FloorDiv", "CleanDiv"), operator.floordiv),
    **dict.fromkeys(("Mod", "PythonMod"), operator.mod),
    "Max": _fold(torch.sym_max),
    "Min": _fold(torch.sym_min),
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": _fold(operator.and_),
    "Or": _fold(operator.or_),
    "Not": torch.sym_not,
}
"""By the names that sympy and torch give to the nodes of an expression."""


def size_in_graph(graph: torch.fx.Graph, size: Any, known: Sequence[torch.fx.Node]) -> Any:
    """A size of a fake tensor as an argument of a node at the end of a graph, computed from the values of ``known`` nodes.

    Raises :class:`CaptureError` for a size that does not follow from them.
    """
    if not private_sizes.is_symbolic(size):
        return int(size)
    sources: dict[Any, tuple[torch.fx.Node, int | None]] = {}
    for node in known:
        value = node.meta.get("val")
        parts = value.shape if isinstance(value, torch.Tensor) else (value,)
        for dim, part in enumerate(parts):
            if private_sizes.is_symbolic(part):
                expression = private_sizes.expression_of(part)
                sources.setdefault(expression, (node, dim if isinstance(value, torch.Tensor) else None))

    def call(function: Callable[..., Any], *items: Any) -> torch.fx.Node:
        values = [item.meta["val"] if isinstance(item, torch.fx.Node) else item for item in items]
        node = graph.call_function(function, items)
        node.meta = {"val": values[0].shape[items[1]] if function is torch.ops.aten.sym_size.int else function(*values)}
        return node

    def made(expression: Any) -> Any:
        if getattr(expression, "is_Integer", False):
            return int(expression)
        if expression in sources:
            node, dim = sources[expression]
            return node if dim is None else call(torch.ops.aten.sym_size.int, node, dim)
        name = type(expression).__name__
        if private_sizes.is_symbol(expression) or name not in SIZE_FUNCTIONS:
            raise CaptureError(
                f"a backward for some of the gradients needs the size {expression}, which follows from nothing that is saved",
                advice="use all results of the compiled function, or keep this size as it is from call to call",
            )
        return call(SIZE_FUNCTIONS[name], *map(made, expression.args))

    return made(private_sizes.expression_of(size))
