"""Items of lists at places that change from call to call: ``memory[i]`` is no entry for each ``i``."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, number_rule, operator_rule
from dovetail.guards import ComputedSource
from dovetail.guards.reading import plain_items, plain_length, read_item
from dovetail.rules.sizes.exact_numbers import source_of_number
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.settings import GRAPH_BREAKS

#: Types of items that are guarded by what they are. Of an object, what is read from it would have to be found again as well.
_READ = (torch.Tensor, torch.nn.Parameter, int, float, bool, str)
_SET_BETWEEN_GRAPHS = "items at places that change are set between two graphs"
_LOOPS_BETWEEN_GRAPHS = "loops over numbers that change go on between two graphs"
#: A loop over a list of numbers is compiled for so many different contents of the list.
_MOST_CONTENTS = 3


@number_rule
def load_item(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """The item of a list that existed before, at a symbolic place: an input that each call finds at its own place."""
    if function is not operator.getitem or type(operands[1]) is not torch.SymInt:
        return NotImplemented
    (items, place), values = operands, interpreter.values
    source = values.source_of(items) if type(items) in (list, tuple, deque) else None
    if source is None or values.in_backward or values.journal.written(items) or private_sizes.is_data_number(place):
        return NotImplemented
    position, number = place.node.hint, source_of_number(interpreter, place)
    if number is None or not 0 <= position < plain_length(items) or type(items[position]) not in _READ:
        return NotImplemented
    return values.read(items[position], ComputedSource(read_item, (source, number), f"{source.name}[{number.name}]"))


@operator_rule(operator.setitem)
def store_item(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """End the graph where an item is set at a symbolic place of a container that existed before: effects know their places."""
    items, place, _ = operands
    if type(place) is torch.SymInt:
        end_before_store(interpreter, items, None if private_sizes.is_data_number(place) else place.node.hint)
    return NotImplemented


def end_before_store(interpreter: TracingInterpreter, items: Any, place: Any) -> None:
    """End the graph before an item is set at a place that changes from call to call; ``place`` is the one of this call.

    Of a dictionary, a few keys have an entry each first: they may be all that there are.
    """
    values, settings = interpreter.values, interpreter.trace.settings
    is_known = type(items) is list or isinstance(items, dict)
    is_old = is_known and values.source_of(items) is not None and not values.in_backward
    if not is_old or not (settings.allows(GRAPH_BREAKS) and settings.allows(_SET_BETWEEN_GRAPHS)):
        return
    if type(items) is list or len(_seen(interpreter, "keys", place)) > _MOST_CONTENTS:
        raise Break(
            "an item is set at a place that changes from call to call",
            "set it outside of the function, or keep the items in one tensor",
            otherwise=_SET_BETWEEN_GRAPHS,
            is_clean=True,
        )


def end_before_growth(interpreter: TracingInterpreter, items: Any) -> None:
    """End the graph before an item is put into a list that had another length in every capture."""
    values, settings = interpreter.values, interpreter.trace.settings
    is_old = values.source_of(items) is not None and not values.in_backward and not values.journal.written(items)
    if not is_old or not (settings.allows(GRAPH_BREAKS) and settings.allows(_SET_BETWEEN_GRAPHS)):
        return
    if len(_seen(interpreter, "lengths", plain_length(items))) > _MOST_CONTENTS:
        raise Break(
            "an item is put into a list that has another length at each call",
            "append it, or put it in outside of the function",
            otherwise=_SET_BETWEEN_GRAPHS,
            is_clean=True,
        )


def _seen(interpreter: TracingInterpreter, what: str, value: Any) -> Any:
    """Contents that captures have seen at this instruction, up to one more than :data:`_MOST_CONTENTS`; ``value`` is seen now."""
    frame = interpreter.frames[-1]
    key = what, frame.code, frame.position
    seen = interpreter.trace.settings.observed.get(key, frozenset())
    if len(seen) <= _MOST_CONTENTS:
        seen = interpreter.trace.findings.observed[key] = seen | {value}
    return seen


@operator_rule(iter)
def go_through(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """End the graph where a loop goes over a list of numbers or texts that differed in every capture, such as places drawn at
    random, or that was longer in every one, such as a history of losses.
    """
    _check_items(interpreter, operands[0], lambda name, item: True)
    return NotImplemented


def check_numbers(interpreter: TracingInterpreter, items: Any) -> None:
    """As above where each number is read by itself: one that was seen to change is a symbol."""
    shapes = interpreter.trace.settings.shapes
    _check_items(interpreter, items, lambda name, item: not shapes.is_symbolic_number(item, name, False))


def _check_items(interpreter: TracingInterpreter, items: Any, is_held: Callable[[str, Any], bool]) -> None:
    """``is_held(name, item)`` says of a number or text whether its guard is that it is equal."""
    values, settings = interpreter.values, interpreter.trace.settings
    source = values.source_of(items) if type(items) in (list, tuple, deque) else None
    if source is None or values.in_backward or not settings.allows(GRAPH_BREAKS):
        return
    held = tuple(
        item
        for at, item in enumerate(plain_items(items))
        if type(item) in (int, float, bool, str) and is_held(f"{source.name}[{at}]", item)
    )
    if held and len(_seen(interpreter, source.name, held)) > _MOST_CONTENTS and settings.allows(_LOOPS_BETWEEN_GRAPHS):
        raise Break(
            f"a loop goes over the items of {source.name}, which are others at each call",
            "keep the numbers in a tensor",
            otherwise=_LOOPS_BETWEEN_GRAPHS,
        )
