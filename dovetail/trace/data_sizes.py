"""Sizes that depend on data: what the graph assumes about them is checked when its forward has run.

A size made by ``nonzero`` or a boolean index is a symbol that no input gives. What is traced with it takes it for a size of two
or more, and may add assumptions of its own (two such sizes are equal). One node at the end of the forward checks both and
raises :class:`OutgrownError`; nothing that the user can see has happened by then, so that the call can still run eagerly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail.errors import CaptureError, OutgrownError
from dovetail.trace.trace import Trace


@dataclass(frozen=True, eq=False)
class DataSizes:
    """What must hold of sizes of some tensors: ``places`` says which of them are looked at."""

    places: tuple[tuple[int, int], ...]
    at_least_two: bool
    holds: Callable[..., bool]

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise :class:`OutgrownError` if it does not hold."""
        sizes = [tensors[tensor].shape[dim] for tensor, dim in self.places]
        if (self.at_least_two and min(sizes) < 2) or not self.holds(*sizes):
            raise OutgrownError(
                f"sizes that depend on data are {sizes}, which the graph was not compiled for",
                advice="nothing has to be done: the call runs eagerly",
            )


_CHECKS: dict[int, DataSizes] = {}
_numbers = itertools.count()
_library = torch.library.Library("dovetail", "FRAGMENT")
_library.define("check_data_sizes(int check, Tensor[] tensors) -> ()")


def _kernel(check: int, tensors: Sequence[torch.Tensor]) -> None:
    _CHECKS[check].check(tensors)


_library.impl("check_data_sizes", _kernel, "CompositeExplicitAutograd")
CHECK_DATA_SIZES = torch.ops.dovetail.check_data_sizes.default
"""The operator; a graph keeps its nodes though nothing reads them."""


def insert_check(trace: Trace, graph: torch.fx.Graph) -> None:
    """Add the node that checks what the trace has assumed about sizes that depend on data; none where nothing was assumed."""
    if not trace.has_unbacked_sizes():
        return
    places: dict[Any, tuple[torch.fx.Node, int]] = {}
    met: set[Any] = set()
    computed_with = False
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        for dim, size in enumerate(value.shape):
            symbols = private.unbacked_symbols_of(size)
            if not symbols:
                continue
            met.update(symbols)
            # A tangent of such a size goes through a backward that was traced with it.
            computed_with = computed_with or node.op == "placeholder" or any(user.op != "output" for user in node.users)
            if node.meta["phase"] == "forward" and private.is_symbol(private.first_expression(size)):
                places.setdefault(symbols[0], (node, dim))
    assumptions = private.assumptions_about_data(trace.shape_env)
    symbols = list(places)
    unknown = [str(item) for item in assumptions if not places.keys() >= set(private.symbols_of(item))]
    unknown += [f"{symbol} is two or more" for symbol in sorted(met - places.keys(), key=str)]
    if unknown:
        raise CaptureError(
            f"the graph is right only if {unknown[0]}, which depends on data and cannot be checked",
            advice="keep sizes and indices independent of the data",
        )
    if not symbols or not (computed_with or assumptions):
        return
    variables = {symbol: f"size_{at}" for at, symbol in enumerate(symbols)}
    text = " and ".join(f"({private.python_text(item, variables)})" for item in assumptions) or "True"
    holds = eval(f"lambda {', '.join(variables.values())}: {text}", private.python_text_globals())
    nodes = list(dict.fromkeys(node for node, _ in places.values()))
    number = next(_numbers)
    _CHECKS[number] = DataSizes(tuple((nodes.index(node), dim) for node, dim in places.values()), computed_with, holds)
    last = [node for node in graph.nodes if node in nodes][-1]
    with graph.inserting_after(last):
        check = graph.call_function(CHECK_DATA_SIZES, (number, nodes))
    check.meta["phase"] = "forward"
