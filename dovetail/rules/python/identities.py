"""``id(value)`` of objects that were there before the call: a number that the entry is bound to, as long as it stays the same."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import Identity
from dovetail.rules.torch.branches_on_data import follows_branches


@rule(id)
def _identity(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """Guard that it is the same object: a table of a model's layers, of an optimizer's parameters, of a scaler's optimizers.

    A function of the program's that is given another object in each call would have an entry for each.
    """
    value, values = args[0] if len(args) == 1 else None, interpreter.values
    source, real = values.source_of(value), value
    if isinstance(value, torch.Tensor):
        traced = interpreter.trace.input_of(value)
        source, real = (None, None) if traced is None else (values.guards.tensor_source(traced.index), traced.real)
        source = source if isinstance(real, torch.nn.Parameter) else None
    if source is None or is_leaf_value(real) or interpreter.is_created(value):
        return interpreter.call_native(id, args, kwargs)
    may_differ = interpreter.trace.settings.one_graph or follows_branches(interpreter)
    if interpreter.trace.changes(f"id({source.name})", id(real)) and not may_differ:
        raise Break("id() of another object is asked for in each call", "use a name for a key")
    values.guard(source, Identity(real), "its id() was asked")
    return id(real)
