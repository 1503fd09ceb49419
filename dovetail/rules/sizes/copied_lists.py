"""``list(counts)`` and ``tuple(counts)``: a copy of a list of numbers that change from call to call has symbolic numbers in it."""

from __future__ import annotations

from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.rules.python import sequences
from dovetail.torch_private import sizes as private_sizes


def _copying(kind: type) -> None:
    any_items = rule[kind]

    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) in (list, tuple):
            given = args[0]
            is_copy = not (kind is type(given) is tuple)
            if is_copy and given and all(type(item) in (int, float) for item in given):
                items = [interpreter.load_item(given, position) for position in range(len(given))]
                if any(map(private_sizes.is_symbolic, items)):
                    interpreter.guard_length(given)
                    return kind(items)
        return any_items(interpreter, args, kwargs)

    rule[kind] = handler


for _kind in sequences.COPIED:
    _copying(_kind)
