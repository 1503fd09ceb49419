"""Numbers that the function itself counts up (``self.steps += 1``): they will be others at the next call.

Such a number would be a constant of the first capture, and a symbol only once a second call has come with another one. The
capture begins again instead, once, with symbols for the numbers in whose place it has written others.
"""

from __future__ import annotations

import dataclasses

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import end_rule
from dovetail.guards import Equals
from dovetail.guards.reading import FETCH_ERRORS
from dovetail.guards.source import CellSource, Step
from dovetail.trace import CaptureSettings, Retry
from dovetail.trace.settings import AS_SYMBOL


@end_rule
def _expect_changes(interpreter: TracingInterpreter) -> None:
    """Raises :class:`Retry` where a number that is a constant of this capture was replaced by another one."""
    shapes = interpreter.trace.settings.shapes
    if not shapes.expects_changes or not interpreter.effects.writes:
        return
    names = _replaced_numbers(interpreter)
    known = dataclasses.replace(shapes, numbers=shapes.numbers | names.keys())
    # One that stayed a constant where it could be a symbol is read in a way that knows no symbols.
    new = {name for name in names.keys() - shapes.numbers if interpreter.trace.settings.allows(name + AS_SYMBOL)}
    counted = {name for name in new if known.is_symbolic_number(names[name], name, False)}
    if not counted:
        return
    interpreter.trace.findings.changing_numbers.update(counted)

    def with_symbols(settings: CaptureSettings) -> CaptureSettings:
        numbers = settings.shapes.numbers | counted
        return dataclasses.replace(settings, shapes=dataclasses.replace(settings.shapes, numbers=numbers))

    raise Retry(f"{', '.join(sorted(counted))} is another number after each call", change=with_symbols)


def _replaced_numbers(interpreter: TracingInterpreter) -> dict[str, int | float]:
    """The numbers that were read, are constants of the graph, and have another one in their place now."""
    containers = {source: container for container, source in interpreter.effects.written_containers()}
    found: dict[str, int | float] = {}
    for guard in interpreter.values.guards.so_far():
        source, predicate = guard.source, guard.predicate
        if not isinstance(predicate, Equals) or type(predicate.value) not in (int, float):
            continue
        try:
            if isinstance(source, CellSource) and source.cell in containers:
                now = containers[source.cell].cell_contents
            elif isinstance(source, Step) and source.base in containers:
                now = source.read(containers[source.base])
            else:
                continue
        except FETCH_ERRORS:
            continue  # It was deleted.
        if type(now) is type(predicate.value) and now != predicate.value:
            found[source.name] = predicate.value
    return found
