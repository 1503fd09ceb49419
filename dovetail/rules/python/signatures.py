"""Signatures that existed before the call (``inspect.signature(update)``, as metrics and array libraries keep them).

Nothing changes a signature or a parameter: which one it is is guarded. A signature is bound by a copy, which needs no guards; a
parameter stays what it is, and its functions are called for real. One that holds more than plain values is left to others.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch

from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, first_rule, rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import ComputedSource, Identity


class _Copies:
    """The copies of this capture, by the ids of the signatures."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self.made: dict[int, tuple[inspect.Signature, inspect.Signature]] = {}


#: Attributes of a callable by which ``inspect`` finds the signature elsewhere.
_SAYS_ITSELF = ("__wrapped__", "__signature__", "_partialmethod", "__partialmethod__")


@rule(inspect.signature)
def _signature(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """The signature of a module is that of its class's ``__call__``, which reads nothing else of the module."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.nn.Module):
        kind = interpreter.call(type, args, {})
        is_torchs = class_attribute(kind, "__call__")[0] is torch.nn.Module.__call__
        if is_torchs and not any(interpreter.call(hasattr, (args[0], name), {}) for name in _SAYS_ITSELF):
            return inspect.signature(types.MethodType(torch.nn.Module.__call__, args[0]))
    return interpreter.native(inspect.signature, args, kwargs)


@first_rule
def _of_a_signature(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    kind = type(args[0]) if args else None
    if kind not in (inspect.Signature, inspect.Parameter):
        return NotImplemented
    value, source = args[0], interpreter.values.source_of(args[0])
    is_own = function in (str, repr) or (type(function) is types.FunctionType and function.__module__ == "inspect")
    if source is None or not is_own or not _is_plain(value):
        return NotImplemented
    interpreter.values.guard(source, Identity(value), f"{source.name} was read")
    if kind is inspect.Parameter:
        return function(*args, **kwargs)
    made = interpreter.state(_Copies).made
    if id(value) not in made:
        made[id(value)] = value, value.replace()
        for name, parameter in value.parameters.items():
            place = ComputedSource(_parameter, (source, name), f"{source.name}.parameters[{name!r}]")
            interpreter.values.note(parameter, place)
    found = interpreter.call(function, (made[id(value)][1], *args[1:]), kwargs)
    return inspect.BoundArguments(value, found.arguments) if type(found) is inspect.BoundArguments else found


def _parameter(signature: inspect.Signature, name: str) -> inspect.Parameter:
    return signature.parameters[name]


def _is_plain(value: inspect.Signature | inspect.Parameter) -> bool:
    """Whether all that a signature or a parameter holds is known by what it is."""
    if isinstance(value, inspect.Signature):
        return _is_fixed(value.return_annotation) and all(map(_is_plain, value.parameters.values()))
    return _is_fixed(value.default) and _is_fixed(value.annotation)


def _is_fixed(value: Any) -> bool:
    return isinstance(value, type) or is_leaf_value(value) or type(value).__module__ in ("types", "typing")
