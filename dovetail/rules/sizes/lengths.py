"""``len(history)`` of a list that grows from call to call: a number that changes, as a size does."""

from __future__ import annotations

from collections import deque
from typing import Any

from dovetail.frontend.interpreter.builtin_rules import length
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import ComputedSource
from dovetail.guards.reading import plain_length


def _len(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    value = args[0] if len(args) == 1 else None
    source = interpreter.values.source_of(value) if type(value) in (list, deque) else None
    if source is None:
        return length(interpreter, args, kwargs)
    journal, trace = interpreter.values.journal, interpreter.trace
    # A deque with a bound may have dropped an item for each that it got.
    appended = journal.only_appended(value) if type(value) is list else 0
    if not appended and journal.written(value):
        return length(interpreter, args, kwargs)
    number = plain_length(value) - appended
    place = ComputedSource(plain_length, (source,), f"len({source.name})")
    if trace.changes(place.name, number):
        trace.findings.changing_numbers.add(place.name)
    if interpreter.values.in_backward or not trace.settings.shapes.is_symbolic_number(number, place.name, False):
        return length(interpreter, args, kwargs)
    return interpreter.values.symbolic_number(number, place) + appended


rule[len] = _len
