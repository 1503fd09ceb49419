"""``torch.cond`` on data is one node of the graph; ``flex_attention`` breaks it.

Both functions of a ``cond`` are interpreted once: the torch calls that they make are programs of the tensors that they use, from
closures and modules too, and one node runs the one or the other for real, with eager's derivatives. Functions that torch
itself refuses (they write, return views or differ in their results) break the graph, so that torch says why.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dovetail.errors import Interruption
from dovetail.frontend.code.frame import Break
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.rules.refusals import refuse
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import trees as private_trees
from dovetail.trace.program import NumberSlot, Program, ProgramCall, Slot
from dovetail.trace.settings import CaptureSettings, Retry
from dovetail.whole_calls.whole import Whole, call_whole

ADVICE = "compute both sides and use torch.where, or call it outside of the compiled function"


# --- what a function of the program does ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    """One function, interpreted once: its torch calls, the numbers of the tensors that it is given, and its results."""

    calls: tuple[ProgramCall, ...]
    given: tuple[int, ...]
    results: list[Any]
    spec: Any
    may_not_end: bool


def slots_of(value: Any) -> list[Any]:
    """The tensors and numbers that the arguments of a call name."""
    if isinstance(value, (Slot, NumberSlot)):
        return [value]
    if isinstance(value, slice):
        return slots_of((value.start, value.stop, value.step))
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [found for item in parts for found in slots_of(item)]


_MOST_OBJECTS = 50_000


def _state(reached_from: list[Any]) -> list[list[Any]]:
    """The containers and objects that a function can reach by its closure or its operands, each with what it holds."""
    found: list[list[Any]] = []
    seen: set[int] = set()
    waiting = [*reached_from]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or is_leaf_value(value) or private_sizes.is_symbolic(value):
            continue
        if isinstance(value, (torch.Tensor, type, types.ModuleType)):
            continue
        seen.add(id(value))
        held: list[Any]
        if len(seen) > _MOST_OBJECTS:
            raise Break("a function of torch's control flow closes over too many objects to see what it writes", ADVICE)
        if isinstance(value, types.FunctionType):
            held = [value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ())]
        elif isinstance(value, types.CellType):
            held = [value.cell_contents] if is_bound(value) else []
        elif isinstance(value, dict):
            held = [*dict.keys(value), *dict.values(value)]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            held = list(value)
        elif isinstance(value, types.MethodType):
            held = [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            held = [value.func, *value.args, *value.keywords.values(), value.__dict__]
        else:
            held = [getattr(value, "__dict__", None)]
        found.append([value, *held])
        waiting += held
    return found


def _is_same(one: list[list[Any]], other: list[list[Any]]) -> bool:
    return len(one) == len(other) and all(
        len(before) == len(after) and all(map(operator.is_, before, after))
        for before, after in zip(one, other, strict=True)
    )


def without_symbols(interpreter: TracingInterpreter, reason: str) -> Interruption:
    """The exception to raise where a size or number is symbolic: the call is captured for its own sizes."""
    if interpreter.trace.settings.shapes.has_symbols:
        return Retry(reason, change=CaptureSettings.with_fewer_symbols)
    return Break(reason, ADVICE)


def _interpret(interpreter: TracingInterpreter, name: str, function: Any, operands: Sequence[Any]) -> Any:
    """The results of a function that does nothing but compute; raises :class:`Break` for others."""
    trace = interpreter.trace
    recorder, nodes, inputs = trace.recorder, len(trace.graph.nodes), len(trace.inputs)
    marker = recorder.number(torch.empty(0))
    before = [private_tensors.version_of(recorder.tensors[number]) for number in range(marker)]
    state_of = [function, *operands]
    writes, state, symbols = interpreter.effects.writes, _state(state_of), trace.data_symbols()
    result = interpreter.call(function, tuple(operands), {})
    after = [private_tensors.version_of(recorder.tensors[number]) for number in range(marker)]
    is_written = before != after or any(private_tensors.is_written(item.value) for item in trace.inputs[inputs:])
    if is_written or writes != interpreter.effects.writes or not _is_same(state, _state(state_of)):
        raise Break(f"a function that {name} is given writes to what exists outside of it", ADVICE)
    impure = any(node.is_impure() for node in list(trace.graph.nodes)[nodes:] if node.op == "call_function")
    if impure or symbols != trace.data_symbols():
        raise Break(f"a function that {name} is given asks for data, or draws random numbers", ADVICE)
    leaves = private_trees.tree_flatten(result)[0]
    taken = {id(item) for item in private_trees.tree_flatten(list(operands))[0]} | {
        recorder.tensors[number].untyped_storage()._cdata for number in range(marker)
    }
    stored = [item.untyped_storage()._cdata for item in leaves if isinstance(item, torch.Tensor)]
    if len(stored) < len(leaves) or len({*stored}) < len(stored) or taken & {*stored}:
        raise Break(f"a function that {name} is given returns something else than new tensors", ADVICE)
    if any(map(private_sizes.has_symbols, leaves)):
        raise without_symbols(interpreter, f"{name} has results of symbolic sizes")
    return result


def trace_branch(interpreter: TracingInterpreter, name: str, function: Any, operands: Sequence[Any]) -> Traced:
    """Interpret one of the functions that ``name`` is given. Raises :class:`Break` for one that does more than to compute."""
    recorder = interpreter.trace.recorder
    start = len(recorder.calls)
    results, spec = private_trees.tree_flatten(_interpret(interpreter, name, function, operands))
    may_not_end = any(
        getattr(getattr(call.function, "function", None), "may_not_end", False) for call in recorder.calls[start:]
    )
    # Where they run for real, calls that are kept whole in the trace are plain calls.
    calls = tuple(
        replace(call, function=call.function.function) if isinstance(call.function, Whole) else call
        for call in recorder.calls[start:]
    )
    del recorder.calls[start:]
    made: set[int] = set()
    given: dict[int, None] = {}
    for call in calls:
        slots = slots_of((call.args, dict(call.kwargs)))
        if any(isinstance(item, NumberSlot) for item in slots):
            raise without_symbols(interpreter, f"a function that {name} is given uses a symbolic size")
        given.update(dict.fromkeys(item.number for item in slots if item.number not in made))
        made.update(call.results)
    if recorder.refusals:
        raise Break(f"{name} cannot be one node: {recorder.refusals[0]}", ADVICE)
    if not all(recorder.number(item) in made for item in results):
        raise Break(f"a function that {name} is given returns something else than new tensors", ADVICE)
    return Traced(calls, tuple(given), results, spec, may_not_end)


# --- cond -------------------------------------------------------------------------------------------------------------


def _facts(value: torch.Tensor) -> Any:
    return value.dtype, tuple(value.shape), value.stride(), value.device


class _Given(torch.autograd.Function):
    """The values that both functions are given: gradients exist and lie as the tensors do, whichever of them has used which.

    As in eager, they are constants: ``torch.cond`` has no second derivative.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.like = [torch.empty_like(item, device="meta") for item in tensors]
        return tuple(item.view_as(item) for item in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        pairs = zip(gradients, ctx.like, strict=True)
        return tuple(item.new_empty_strided(like.shape, like.stride()).copy_(item.detach()) for item, like in pairs)


class _Connected(torch.autograd.Function):
    """A result that was computed without gradients, with gradients of zero for what the functions are given."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        ctx.like = [(torch.empty_like(item, device="meta"), item.device) for item in given]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *[torch.zeros_like(item, device=device) for item, device in ctx.like]


def _conditional(interpreter: TracingInterpreter, branches: Sequence[Traced], condition: torch.Tensor) -> Any:
    recorder = interpreter.trace.recorder
    first, second = branches
    if first.spec != second.spec or list(map(_facts, first.results)) != list(map(_facts, second.results)):
        raise Break("the functions that torch.cond is given return different kinds of results", ADVICE)
    numbers = list(dict.fromkeys((*first.given, *second.given)))
    tensors = [recorder.tensors[number] for number in numbers]
    programs = [
        Program(tuple(numbers), item.calls, tuple(recorder.number(result) for result in item.results))
        for item in branches
    ]

    def cond(predicate: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        inside = _Given.apply(*given)  # type: ignore[no-untyped-call]
        results = programs[0 if predicate.item() else 1].run(list(inside))
        # As in eager, each result of numbers requires a gradient as soon as anything does that one of the functions has used.
        return [
            item if item.requires_grad or not item.is_floating_point() else _Connected.apply(item, *inside)  # type: ignore[no-untyped-call]
            for item in results
        ]

    found = call_whole(cond, (condition, *tensors), {})
    return private_trees.tree_unflatten(list(found), first.spec)


def _holds_only_tensors(value: Any) -> bool:
    """Whether an operand is a tensor, or plain containers of tensors, which is what ``torch.cond`` takes."""
    if type(value) in (tuple, list):
        return all(map(_holds_only_tensors, value))
    return all(map(_holds_only_tensors, value.values())) if type(value) is dict else isinstance(value, torch.Tensor)


@rule(torch.cond)
def _cond(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    names = ("pred", "true_fn", "false_fn", "operands")
    given = {"operands": (), **dict(zip(names, args, strict=False)), **kwargs}
    if given.keys() != {*names} or len(args) + len(kwargs) > len(names):
        return interpreter.call_guarded(torch.cond, args, kwargs)
    condition, operands = given["pred"], given["operands"]
    if not isinstance(condition, torch.Tensor):
        return interpreter.call_guarded(torch.cond, args, kwargs)
    is_plain = isinstance(operands, (tuple, list)) and all(map(_holds_only_tensors, operands))
    if not is_plain or condition.numel() != 1 or not callable(given["true_fn"]) or not callable(given["false_fn"]):
        raise Break("torch.cond is given something else than tensors and functions of them", ADVICE)
    branches = [trace_branch(interpreter, "torch.cond", given[name], operands) for name in ("true_fn", "false_fn")]
    if any(item.may_not_end for item in branches):
        raise Break("a function that torch.cond is given has a loop whose end depends on data", ADVICE)
    return interpreter.values.wrap(_conditional(interpreter, branches, condition))


# --- flex_attention ---------------------------------------------------------------------------------------------------

# torch.compile cannot read a trace of Dovetail's.
refuse(
    (private_libraries.flex_attention(),),
    "{name} compiles the functions that it is given with torch.compile",
    "write it with operators of torch, or call it outside of the compiled function",
)
