"""Symbolic sizes as data: what an artefact says instead of ``2*s0``, and what it means of other symbols.

An expression is a whole number, ``{"symbol": n}``, or ``{"call": "Add", "args": [...]}`` with a function of a short list.
It is never text that something evaluates.

>>> evaluate({"call": "FloorDiv", "args": [{"symbol": 0}, 2]}, [7])
3
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import ArtefactError, CaptureError
from dovetail.torch_private import sizes as private_sizes

MAXIMUM_EXPONENT = 8


def _power(base: Any, exponent: Any) -> Any:
    if not isinstance(exponent, int) or not 0 <= exponent <= MAXIMUM_EXPONENT:
        raise ArtefactError("a size is a power that is not allowed in an artefact")
    return functools.reduce(operator.mul, [base] * exponent, 1)


def _fold(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *items: functools.reduce(function, items)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": _fold(operator.add),
    "Mul": _fold(operator.mul),
    "Pow": _power,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
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


def encode_size(value: Any, numbers: Mapping[Any, int]) -> Any:
    """A size of a fake tensor as data; ``numbers`` says which symbol has which number. Raises :class:`ArtefactError`."""
    return (
        encode_expression(private_sizes.expression_of(value), numbers)
        if private_sizes.is_symbolic(value)
        else int(value)
    )


def encode_expression(expression: Any, numbers: Mapping[Any, int]) -> Any:
    """An expression over symbols as data; raises :class:`ArtefactError` for one that has no place in an artefact."""
    if getattr(expression, "is_Integer", False):
        return int(expression)
    if private_sizes.is_symbol(expression):
        if expression not in numbers:
            raise ArtefactError(
                f"a size depends on {expression}, which cannot be read off the inputs",
                advice="keep sizes independent of the data",
            )
        return {"symbol": numbers[expression]}
    name = type(expression).__name__
    if name not in _FUNCTIONS:
        raise ArtefactError(
            f"the size {expression} cannot be written to an artefact", advice="mark fewer sizes as dynamic"
        )
    return {"call": name, "args": [encode_expression(item, numbers) for item in expression.args]}


def evaluate(data: Any, symbols: Sequence[Any]) -> Any:
    """The value of an expression; raises :class:`ArtefactError` for a function that is not on the list."""
    if isinstance(data, int):
        return data
    if "symbol" in data:
        if data["symbol"] >= len(symbols):
            raise ArtefactError("a size in the artefact names a symbol that does not exist")
        return symbols[data["symbol"]]
    function = _FUNCTIONS.get(data["call"])
    if function is None or not 1 <= len(data["args"]) <= 64:
        raise ArtefactError(f"the function {data['call']!r} of sizes is not allowed in an artefact")
    items = [evaluate(item, symbols) for item in data["args"]]
    if function is _power and len(items) != 2:
        raise ArtefactError("a size in the artefact is a power of something else than two numbers")
    return function(*items)


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
        if private_sizes.is_symbol(expression) or name not in _FUNCTIONS:
            raise CaptureError(
                f"a backward for some of the gradients needs the size {expression}, which follows from nothing that is saved",
                advice="use all results of the compiled function, or keep this size as it is from call to call",
            )
        return call(_FUNCTIONS[name], *map(made, expression.args))

    return made(private_sizes.expression_of(size))
