"""Items of lists at places that change from call to call: ``memory[i]`` is no entry for each ``i``."""

from __future__ import annotations

import operator
import reprlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, number_rule, operator_rule, whole_rule
from dovetail.frontend.values.values import Values
from dovetail.guards import ComputedSource, Equals, ItemSource, Source
from dovetail.guards.reading import plain_items, plain_length, read_item
from dovetail.rules.sizes.exact_numbers import source_of_number
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace import can_be_symbolic
from dovetail.trace.settings import GRAPH_BREAKS

#: Types of items that are guarded by what they are.
_READ = (torch.Tensor, torch.nn.Parameter, int, float, bool, str)
_HELD = (int, float, bool, str)
_NUMBERS = (*_HELD, torch.SymInt, torch.SymFloat)
_SET_BETWEEN_GRAPHS = "items at places that change are set between two graphs"
_LOOPS_BETWEEN_GRAPHS = "loops over numbers that change go on between two graphs"
_PARTS_BETWEEN_GRAPHS = "parts of lists are taken between two graphs"
_HISTORIES_BETWEEN_GRAPHS = "histories are read between two graphs"
#: A loop over a list of numbers is compiled for so many different contents of the list.
_MOST_CONTENTS = 3
#: So many items of a part of a list are read one by one.
_MOST_READ = 64
#: A table of constants is kept up to this length.
_MOST_CONSTANTS = 4096
#: A list is read as a whole in so many lengths before it counts as one that grows without end.
_MOST_LENGTHS = 6


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
    if number is None or not 0 <= position < plain_length(items) or not _is_readable(items[position]):
        return NotImplemented
    return values.read(items[position], ComputedSource(read_item, (source, number), f"{source.name}[{number.name}]"))


@number_rule
def load_constant(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """The number at a symbolic place of a tuple of constants, or of a list that the program has made: ``(0.1, 0.05)[epoch]``."""
    if (
        function is not operator.getitem
        or type(operands[1]) is not torch.SymInt
        or type(operands[0]) not in (list, tuple)
    ):
        return NotImplemented
    items, place = operands
    values, number = interpreter.values, source_of_number(interpreter, place)
    is_plain = all(type(item) in (int, float) for item in items)
    if number is None or values.in_backward or values.source_of(items) is not None or not is_plain:
        return NotImplemented
    if place.node.hint < -len(items) or len(items) > _MOST_CONSTANTS:
        return NotImplemented
    if interpreter.truth(interpreter.operate(operator.ge, place, len(items))):
        raise IndexError(f"{type(items).__name__} index out of range")
    source = ComputedSource(read_item, (tuple(items), number), f"{reprlib.repr(items)}[{number.name}]")
    value = items[place.node.hint]
    if can_be_symbolic(value):
        return values.symbolic_number(value, source)
    values.guard(source, Equals(value), f"{source.name} was read")
    return value


def _is_readable(item: Any) -> bool:
    """Whether the item of another place can stand for this one: of a tuple, all that is read from it is found again, too."""
    if isinstance(item, tuple):
        return all(type(part) in _READ for part in tuple.__iter__(item))
    return type(item) in _READ


@number_rule
def load_from_the_end(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """``log[-1]`` and ``log[-3:]`` of a list that existed before and grows: by places that are counted from its end."""
    if function is not operator.getitem or type(operands[0]) not in (list, deque, tuple):
        return NotImplemented
    (items, key), values = operands, interpreter.values
    length, is_part = plain_length(items), type(key) is slice
    first = key.start if is_part and key.stop is None and key.step in (None, 1) else key
    source = values.source_of(items)
    if source is None or type(first) is not int or not -min(length, _MOST_READ) <= first < 0:
        return NotImplemented
    # A deque with a bound may have dropped an item for each that it got.
    appended = values.journal.only_appended(items) if type(items) is list else 0
    if not is_part and first >= -appended:
        return values.wrap(read_item(items, first))
    if (not appended and values.journal.written(items)) or (is_part and values.in_backward):
        return NotImplemented
    if not interpreter.trace.changes(("length", source.name), length - appended):
        return NotImplemented
    # Where there are fewer items, the first of them is not found.
    found = [
        values.wrap(read_item(items, place))
        if place >= -appended
        else values.read(read_item(items, place), ItemSource(source, place + appended))
        for place in range(first, 0 if is_part else first + 1)
    ]
    return found if is_part else found[0]


@number_rule
def load_part(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """As many items of a list that existed before from a symbolic place on: ``samples[i * 2 : i * 2 + 2]``."""
    if function is not operator.getitem or type(operands[1]) is not slice or type(operands[0]) not in (list, tuple):
        return NotImplemented
    items, part = operands
    start, stop = part.start, part.stop
    if {type(start), type(stop)} != {torch.SymInt} or part.step not in (None, 1):
        return _end_before_part(interpreter, items, part)
    count = stop - start
    is_fixed = type(count) is int or not private_sizes.symbols_of(private_sizes.first_expression(count))
    if any(map(private_sizes.is_data_number, (start, stop))) or not is_fixed or not 0 < int(count) <= _MOST_READ:
        return _end_before_part(interpreter, items, part)
    places = [start + at for at in range(int(count))]
    if stop.node.hint > plain_length(items) or not interpreter.truth(interpreter.operate(operator.ge, start, 0)):
        return NotImplemented
    found = [load_item(interpreter, operator.getitem, (items, place)) for place in places]
    return NotImplemented if any(item is NotImplemented for item in found) else found


def _end_before_part(interpreter: TracingInterpreter, items: Any, part: slice) -> Any:
    """End the graph before a part of a list is taken that was longer or shorter in an earlier capture."""
    settings, frame = interpreter.trace.settings, interpreter.frames[-1]
    bounds = [item for item in (part.start, part.stop, part.step) if type(item) is torch.SymInt]
    is_list = type(items) is list and not interpreter.values.in_backward
    if not bounds or not is_list or any(map(private_sizes.is_data_number, bounds)):
        return NotImplemented
    plain = [item.node.hint if type(item) is torch.SymInt else item for item in (part.start, part.stop, part.step)]
    count = len(range(*slice(*plain).indices(plain_length(items))))
    is_other = interpreter.trace.changes(("part", frame.code, frame.position), count)
    if is_other and settings.allows(GRAPH_BREAKS) and settings.allows(_PARTS_BETWEEN_GRAPHS):
        raise Break(
            "a part of a list has as many items as a number that changes from call to call",
            "keep the items in one tensor, or take the part outside of the function",
            otherwise=_PARTS_BETWEEN_GRAPHS,
        )
    return NotImplemented


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


@whole_rule
def read_whole(values: Values, container: Any, source: Source, items: Any) -> None:
    """End the graph before a list is read as a whole that is a history: one that was longer in every capture, or held other
    numbers. The reader (``log[-3:]``, ``torch.stack(log)``, ``log.pop(0)``) runs for real, and its result is an input.
    """
    settings, findings = values.trace.settings, values.trace.findings
    if type(container) not in (list, deque) or values.in_backward or not settings.allows(_HISTORIES_BETWEEN_GRAPHS):
        return
    key, length = ("history", source.name, values.where()), plain_length(items)
    is_short = type(container) is deque and container.maxlen is not None and container.maxlen <= _MOST_LENGTHS
    shapes, named = settings.shapes, enumerate(plain_items(items))
    held = hash(
        tuple(
            item
            for at, item in named
            if type(item) in _HELD and not shapes.is_symbolic_number(item, f"{source.name}[{at}]", False)
        )
    )
    lengths, contents = settings.observed.get(key, ((), frozenset()))
    if length not in lengths and len(lengths) <= _MOST_LENGTHS and not is_short:
        lengths = (*lengths, length) if length > max(lengths, default=-1) else (length,)
    contents = contents if len(contents) > _MOST_CONTENTS else contents | {held}
    findings.observed[key] = lengths, contents
    # The function itself has put numbers there: they will be others at the next call.
    is_filled = plain_length(container) > length and any(type(item) in _NUMBERS for item in plain_items(container))
    is_history = is_filled or len(lengths) > _MOST_LENGTHS or len(contents) > _MOST_CONTENTS
    if settings.allows(GRAPH_BREAKS) and is_history:
        raise Break(
            f"all items of {source.name} are read, which are others at each call",
            "keep the items in one tensor, or read them outside of the function",
            otherwise=_HISTORIES_BETWEEN_GRAPHS,
        )


def _check_items(interpreter: TracingInterpreter, items: Any, is_held: Callable[[str, Any], bool]) -> None:
    """``is_held(name, item)`` says of a number or text whether its guard is that it is equal."""
    values, settings = interpreter.values, interpreter.trace.settings
    source = values.source_of(items) if type(items) in (list, tuple, deque) else None
    if source is None or values.in_backward or not settings.allows(GRAPH_BREAKS):
        return
    held = tuple(
        item
        for at, item in enumerate(plain_items(items))
        if type(item) in _HELD and is_held(f"{source.name}[{at}]", item)
    )
    if held and len(_seen(interpreter, source.name, held)) > _MOST_CONTENTS and settings.allows(_LOOPS_BETWEEN_GRAPHS):
        raise Break(
            f"a loop goes over the items of {source.name}, which are others at each call",
            "keep the numbers in a tensor",
            otherwise=_LOOPS_BETWEEN_GRAPHS,
        )
