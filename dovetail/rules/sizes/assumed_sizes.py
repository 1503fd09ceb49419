"""Checks, in the graph, of what was assumed about sizes that the data decides: an operator that raises where it does not hold.

That something is left (``if len(boxes[mask]) > 0``) is assumed of the program's own branches too, as long as it mostly holds.

A check stands behind the first node that has the size, in the forward, before the kernels that read it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Frame
from dovetail.frontend.outputs import number_as_tensor
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Jump, Keywords, branch_rule, rule
from dovetail.guards import Answers
from dovetail.rules.torch.branches_on_data import assert_in_graph, may_assert, take_way_without_raise
from dovetail.runtime.entry import FAILED
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import numbers as private_numbers
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace import ASSUMPTION, Trace
from dovetail.trace.overrides import DATA_SIZES
from dovetail.trace.settings import EAGER_INSTEAD

_assert = torch.ops.aten._assert_scalar.default
_size = torch.ops.aten.sym_size.int
_MOST_FAILURES = 8


class _Place(NamedTuple):
    """A node that has a symbolic number, as its value or as the size of a dimension; ``order`` counts the nodes."""

    order: int
    node: torch.fx.Node
    dim: int | None


@DATA_SIZES.append
def check_assumptions(trace: Trace) -> None:
    """Put the assumptions about sizes made of data into the graph."""
    _assume_divisors(trace)
    assumptions = trace.assumptions()
    places = _places(trace.graph) if assumptions else {}
    for expression in assumptions:
        if not _check_directly(trace, expression, places):
            _check_otherwise(trace, expression)


def _assume_divisors(trace: Trace) -> None:
    """Python's division by zero raises; that of C++, by which torch computes its formulas (the gradient of ``std``), does not."""
    for node in trace.graph.nodes:
        if node.target is not operator.truediv or not isinstance(node.args[1], torch.fx.Node):
            continue
        divisor = node.args[1].meta.get("val")
        is_zero = private_sizes.is_data_number(divisor) and divisor == 0
        if private_sizes.is_symbolic(is_zero):
            private_sizes.assume_usual_sizes(trace.shape_env, private_sizes.expression_of(is_zero))


@rule(F.scaled_dot_product_attention)
def _attention(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """Attention to no rows takes another kernel, and torch 2.15 takes it, without asking, where nothing is known of the size."""
    environment = interpreter.trace.shape_env
    for tensor in (*args[:2], kwargs.get("query"), kwargs.get("key")):
        size = tensor.shape[-2] if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 else 1
        if environment.may_assume and private_sizes.is_data_number(size):
            private_sizes.assume_usual_sizes(environment, private_sizes.expression_of(size == 0))
    return interpreter.call_torch(F.scaled_dot_product_attention, args, kwargs)


def _mostly_holds(failed: Counter[str], text: str) -> bool:
    """Whether an assumption has failed in a few calls only."""
    return sum(count for message, count in failed.items() if text in message) < _MOST_FAILURES


@branch_rule
def assume_that_something_is_left(interpreter: TracingInterpreter, condition: Any, jump: Jump | None) -> Any:
    """The truth of the program's own question whether a size is 0, for a size that is not: the graph checks it. Where that has
    failed, both ways are common, and the graph breaks; an entry for one graph, which is asked for, leaves such calls to eager.
    """
    # Of several processes, one that runs eagerly may leave the others waiting.
    is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    if jump is None or isinstance(condition, torch.Tensor) or not (is_alone and may_assert(interpreter)):
        return NotImplemented
    if (found := take_way_without_raise(interpreter, condition, jump)) is not NotImplemented:
        return found
    values, settings, frame = interpreter.values, interpreter.trace.settings, jump.frame
    truth = private_numbers.truth_for_some(condition)
    text = f"something is left in line {frame.line()} of {frame.code.co_name}"
    is_kept = settings.one_graph or _mostly_holds(FAILED, text)
    if truth is None or not is_kept or not settings.allows(EAGER_INSTEAD) or _decides_a_loop(frame):
        return NotImplemented
    if not settings.one_graph:
        reason = "a branch asks whether something is left"
        values.guard(values.pin(FAILED, "failed assumptions"), Answers(_mostly_holds, (text,), True), reason)
    with private_calls.no_torch_function(), torch.no_grad():
        asked = number_as_tensor(condition)
        assert_in_graph(asked if truth else asked.bool().logical_not(), text)
    return truth


def _decides_a_loop(frame: Frame) -> bool:
    """Whether a branch lies in a ``while`` loop, which would go round without an end."""
    instructions = frame.decoded.instructions
    for instruction in instructions[frame.position :]:
        first = frame.decoded.index_of[instruction.argval] if "BACKWARD" in instruction.opname else len(instructions)
        if first <= frame.position + 1 and instructions[first].opname != "FOR_ITER":
            return True
    return False


def _places(graph: torch.fx.Graph) -> dict[Any, _Place]:
    found: dict[Any, _Place] = {}
    for order, node in enumerate(graph.nodes):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]:
            if private_sizes.is_symbolic(size):
                found.setdefault(private_sizes.first_expression(size), _Place(order, node, dim))
    return found


def _check_directly(trace: Trace, expression: Any, places: Mapping[Any, _Place]) -> bool:
    """Check a relation between whole numbers and numbers that nodes have; returns whether it is one."""
    relation, *sides = private_numbers.parts_of_relation(expression)
    known = [places[side] for side in sides if side in places]
    if relation is None or len(known) + sum(type(side) is int for side in sides) < len(sides):
        return False
    last = max(known, key=lambda place: place.order)
    made: list[torch.fx.Node] = []

    def call(value: Any, function: Any, *args: Any) -> torch.fx.Node:
        with trace.graph.inserting_after(made[-1] if made else last.node):
            made.append(trace.graph.call_function(function, args))
        made[-1].meta.update(val=value, phase=last.node.meta.get("phase", "forward"))
        return made[-1]

    numbers: list[Any] = []
    for side in sides:
        place = places.get(side)
        if place is None or place.dim is None:
            numbers.append(side if place is None else place.node)
        else:
            numbers.append(call(place.node.meta["val"].shape[place.dim], _size, place.node, place.dim))
    condition = call(private_numbers.symbolic_truth(trace.shape_env, expression), relation, *numbers)
    call(None, _assert, condition, f"{ASSUMPTION}{expression}")
    return True


def _check_otherwise(trace: Trace, expression: Any) -> None:
    # Without gradients: a node that is recorded with them in the backward counts as computed there.
    with private_calls.no_torch_function(), torch.no_grad():
        condition = private_numbers.symbolic_truth(trace.shape_env, expression)
        # The shape environment takes a relation for settled since it has put one number in place of another.
        is_settled = private_sizes.expression_of(condition) == True  # noqa: E712  (sympy's)
        if is_settled or not private_numbers.is_expressible(expression):
            raise CaptureError(
                f"the graph is right only if {expression}, which depends on data and cannot be checked",
                advice="keep sizes and indices independent of the data",
            )
        _assert(condition, f"{ASSUMPTION}{expression}")
