"""Signatures that existed before the call (``inspect.signature(update)``, as metrics and array libraries keep them).

Nothing changes a signature: which one it is is guarded, and the program is given a copy of its own, whose parts need no guards.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, first_rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import Identity


class _Copies:
    """The copies of this capture, by the ids of the signatures."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self.made: dict[int, tuple[Any, Any]] = {}


@first_rule
def _of_a_copy(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    if not args or type(args[0]) is not inspect.Signature or type(function) is not types.FunctionType:
        return NotImplemented
    signature, source = args[0], interpreter.values.source_of(args[0])
    if source is None or vars(inspect.Signature).get(function.__name__) is None:
        return NotImplemented
    parts = signature.parameters.values()
    if not all(is_leaf_value(item.default) or isinstance(item.default, (type, types.FunctionType)) for item in parts):
        return NotImplemented
    interpreter.values.guard(source, Identity(signature), f"{source.name} was read")
    made = interpreter.state(_Copies).made
    if id(signature) not in made:
        made[id(signature)] = signature, signature.replace()
    return interpreter.call(function, (made[id(signature)][1], *args[1:]), kwargs)
