"""``associative_scan`` along a symbolic size, as one call.

torch's algorithm halves the sequence and asks at each level whether there is a rest: unrolled, each length is a graph of its own.
Here the function that combines two elements is traced once, on the first element; its torch calls are what torch's own
algorithm is given when the graph runs, with real sizes (:mod:`dovetail.trace.sized`).
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.rules.sizes.recurrent_networks import SizedFunction, call_sized
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace.program import NumberSlot, Program, ProgramCall, Slot

_DEPTH = 4


@rule(private_tracing.associative_scan)
def _associative_scan(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _scan(interpreter, *args, **kwargs)
    return interpreter.call_torch(private_tracing.associative_scan, args, kwargs) if result is None else result


def _scan(
    interpreter: TracingInterpreter,
    combine_fn: Any,
    xs: Any,
    dim: Any,
    reverse: Any = False,
    combine_mode: Any = "pointwise",
) -> Any:
    """The whole call; None where torch's own function does it, or refuses it."""
    elements, structure = private_trees.tree_flatten(interpreter.values.for_native(xs))
    plain = (type(dim), type(reverse), combine_mode) == (int, bool, "generic")
    if not plain or not elements or not all(isinstance(item, torch.Tensor) for item in elements):
        return None
    if private_state.is_any_autocast_on() or not _is_settled(combine_fn, _DEPTH):
        return None
    rank = elements[0].dim()
    if not -rank <= dim < rank or any(item.dim() != rank for item in elements):
        return None
    dim %= rank
    lengths = [item.shape[dim] for item in elements]
    if not any(map(private_sizes.is_symbolic, lengths)) or not all(item == lengths[0] for item in lengths):
        return None

    def call(function: Any, *arguments: Any) -> Any:
        return interpreter.call_torch(function, arguments, {})

    combined = _combination(interpreter, combine_fn, elements, structure, dim)
    if combined is None:
        return None

    def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        def combine(left: Any, right: Any) -> Any:
            return combined.run([*left, *right])

        found: Any = private_tracing.associative_scan(combine, list(given), 0, False, "generic")
        return found

    def sizes(*given: torch.Tensor) -> list[tuple[Sequence[Any], torch.dtype]]:
        return [(item.shape, item.dtype) for item in given]

    given = [call(torch.movedim, item, dim, 0) for item in elements]
    given = [call(torch.flip, item, [0]) for item in given] if reverse else given
    found: Sequence[torch.Tensor] = call_sized(interpreter, SizedFunction("associative_scan", run, sizes), given)
    found = [call(torch.flip, item, [0]) for item in found] if reverse else found
    return private_trees.tree_unflatten([call(torch.movedim, item, 0, dim) for item in found], structure)


def _is_settled(function: Any, depth: int) -> bool:
    """Whether nothing that a function holds can change while it is traced: to trace it once must have no effect."""
    if not isinstance(function, types.FunctionType) or not depth:
        return False
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    held = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(
        is_leaf_value(item)
        or isinstance(item, (torch.Tensor, torch.nn.Module, types.ModuleType, types.BuiltinFunctionType))
        or _is_settled(item, depth - 1)
        for item in held
    )


def _combination(
    interpreter: TracingInterpreter, combine_fn: Any, elements: Sequence[torch.Tensor], structure: Any, dim: int
) -> Program | None:
    """The torch calls by which two elements are combined; None for a function that needs anything else."""
    trace = interpreter.trace
    recorder = trace.recorder
    first = [[interpreter.call_torch(torch.select, (item, dim, 0), {}) for item in elements] for _ in ("left", "right")]
    inputs = [*first[0], *first[1]]
    begin, writes, unreplayable = len(recorder.calls), interpreter.effects.writes, recorder.unreplayable
    nodes = len(trace.graph.nodes)
    pairs = [private_trees.tree_unflatten(items, structure) for items in first]
    found = interpreter.call(combine_fn, tuple(pairs), {})
    if interpreter.effects.writes != writes:
        raise Break(
            "the function that an associative_scan combines by writes to an object outside of it",
            "combine tensors only: how often the function is called depends on their sizes",
        )
    calls = tuple(recorder.calls[begin:])
    results, own = private_trees.tree_flatten(found)
    is_pure = recorder.unreplayable == unreplayable and own == structure
    if not is_pure or not all(isinstance(item, torch.Tensor) for item in results):
        return None
    if any(
        item.shape != given.shape or item.dtype != given.dtype for item, given in zip(results, first[0], strict=True)
    ):
        return None
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in _last(trace, nodes)):
        return None
    numbers = [recorder.number(item) for item in inputs]
    known = set(numbers)
    for item in calls:
        if not _stays_inside(item, known):
            return None
        known.update(item.results)
    outputs = tuple(recorder.number(item) for item in results)
    # Nobody reads their results: neither the program nor the graph needs them.
    del recorder.calls[begin:]
    return Program(tuple(numbers), calls, outputs) if known.issuperset(outputs) else None


def _last(trace: Any, begin: int) -> list[torch.fx.Node]:
    nodes: list[torch.fx.Node] = list(trace.graph.nodes)[begin:]
    return nodes


def _stays_inside(call: ProgramCall, known: set[int]) -> bool:
    """Whether a call computes with nothing but the two elements, and with plain numbers."""
    leaves = private_trees.tree_leaves((call.args, dict(call.kwargs)))
    return all(leaf.number in known for leaf in leaves if isinstance(leaf, Slot)) and not any(
        isinstance(leaf, NumberSlot) for leaf in leaves
    )
