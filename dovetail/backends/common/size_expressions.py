"""Symbolic sizes as data: ``2*s0`` in an artefact, and its value for other symbols.

An expression is a whole number, ``{"symbol": n}``, or ``{"call": "Add", "args": [...]}`` with a function of a short list.
It is never text that something evaluates.

>>> evaluate({"call": "FloorDiv", "args": [{"symbol": 0}, 2]}, [7])
3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.aot.sizes_in_graph import SIZE_FUNCTIONS, power
from dovetail.errors import ArtefactError
from dovetail.torch_private import sizes as private_sizes


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
    if name not in SIZE_FUNCTIONS:
        raise ArtefactError(
            f"the size {expression} cannot be written to an artefact", advice="mark fewer sizes as dynamic"
        )
    return {"call": name, "args": [encode_expression(item, numbers) for item in expression.args]}


def depends_on_data(value: Any) -> bool:
    """Whether a tensor has a size, or a value is a whole number or truth value, that a tensor's data decide. A float is no size."""
    if isinstance(value, torch.Tensor):
        return any(map(private_sizes.is_data_number, (*value.shape, *value.stride(), value.storage_offset())))
    if isinstance(value, (list, tuple)):
        return any(map(depends_on_data, value))
    return not isinstance(value, torch.SymFloat) and private_sizes.is_data_number(value)


def evaluate(data: Any, symbols: Sequence[Any]) -> Any:
    """The value of an expression; raises :class:`ArtefactError` for a function that is not on the list."""
    if isinstance(data, int):
        return data
    if "symbol" in data:
        if data["symbol"] >= len(symbols):
            raise ArtefactError("a size in the artefact names a symbol that does not exist")
        return symbols[data["symbol"]]
    function = SIZE_FUNCTIONS.get(data["call"])
    if function is None or not 1 <= len(data["args"]) <= 64:
        raise ArtefactError(f"the function {data['call']!r} of sizes is not allowed in an artefact")
    items = [evaluate(item, symbols) for item in data["args"]]
    if function is power and len(items) != 2:
        raise ArtefactError("a size in the artefact is a power of something else than two numbers")
    try:
        return function(*items)
    except ValueError as error:
        raise ArtefactError(f"a size in the artefact is not allowed: {error}") from error
