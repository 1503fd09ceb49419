"""Symbolic sizes as inputs of their own, for a compiler whose cache looks for them there.

Inductor's cache keeps, beside a compiled graph, the conditions on its whole-number inputs. A size that comes in as part of a
tensor only has no conditions there: code compiled for sizes up to 4096 was seen to be found again for 5000, and nothing said
that it was not made for that (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.errors import BackendError
from dovetail.torch_private import sizes as private_sizes

Place = tuple[int, str, int]


def add_size_inputs(graph: torch.fx.GraphModule, examples: list[Any]) -> list[Place]:
    """Give ``graph`` and ``examples`` one more input for each symbol; where each is read: (input, "size" or "stride", dim).

    Raises :class:`BackendError` for a symbol that is no size or stride of an input.
    """
    known = {private_sizes.first_expression(item) for item in examples if isinstance(item, torch.SymInt)}
    places: dict[Any, tuple[Place, Any]] = {}
    needed: dict[Any, None] = {}
    for index, value in enumerate(examples):
        if not isinstance(value, torch.Tensor) or not private_sizes.has_symbols(value):
            continue
        for kind, numbers in (("size", value.shape), ("stride", value.stride())):
            for dim, number in enumerate(numbers):
                if not private_sizes.is_symbolic(number):
                    continue
                expression = private_sizes.first_expression(number)
                needed.update(dict.fromkeys(private_sizes.symbols_of(expression)))
                if private_sizes.is_symbol(expression):
                    places.setdefault(expression, ((index, kind, dim), number))
    missing = [symbol for symbol in needed if symbol not in known and symbol not in places]
    if missing:
        raise BackendError(
            f"the size {missing[0]} is no size of an input",
            advice='use backend="aten", or dynamic=False for this function',
        )
    chosen = [found for symbol, found in places.items() if symbol not in known]
    last = graph.graph.find_nodes(op="placeholder")[-1]
    for number, (_, value) in enumerate(chosen):
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"dovetail_size_{number}")
        last.meta["val"] = value
        examples.append(value)
    return [place for place, _ in chosen]


def with_size_inputs(
    compiled: Callable[[list[Any]], list[Any]], places: Sequence[Place]
) -> Callable[[list[Any]], list[Any]]:
    """A callable without the inputs that :func:`add_size_inputs` added."""
    if not places:
        return compiled

    def run(inputs: list[Any]) -> list[Any]:
        sizes = [inputs[i].size(dim) if kind == "size" else inputs[i].stride(dim) for i, kind, dim in places]
        inputs.extend(sizes)
        return compiled(inputs)

    return run
