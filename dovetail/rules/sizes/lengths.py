"""``len(history)`` of a list that grows from call to call: a number that changes, as a size does."""

from __future__ import annotations

from collections import deque
from typing import Any

from dovetail.frontend.interpreter.builtin_rules import length
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import ComputedSource, Equals
from dovetail.guards.reading import plain_length


def length_after(items: deque[Any], appended: int) -> int:
    """The length of a deque once items were appended: one with a bound drops an item for each that it gets when it is full.

    >>> length_after(deque([1, 2], maxlen=3), 2)
    3
    """
    length = plain_length(items) + appended
    return length if items.maxlen is None else min(length, items.maxlen)


def _len(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    value = args[0] if len(args) == 1 else None
    source = interpreter.values.source_of(value) if type(value) in (list, deque) else None
    if source is None:
        return length(interpreter, args, kwargs)
    journal, trace = interpreter.values.journal, interpreter.trace
    grown = appended = journal.only_appended(value)
    if not grown and journal.written(value):
        return length(interpreter, args, kwargs)
    if grown and type(value) is deque:
        place = ComputedSource(length_after, (source, appended), f"len({source.name}) after {appended} more")
        number, appended = plain_length(value), 0
    else:
        number = plain_length(value) - appended
        place = ComputedSource(plain_length, (source,), f"len({source.name})")
    if trace.changes(place.name, number):
        trace.findings.changing_numbers.add(place.name)
    if not interpreter.values.in_backward and trace.settings.shapes.is_symbolic_number(number, place.name, False):
        return interpreter.values.symbolic_number(number, place) + appended
    if not grown:
        return length(interpreter, args, kwargs)
    # The items are not read.
    interpreter.values.guard(place, Equals(number), f"the length of {source.name} was read")
    return number + appended


rule[len] = _len
