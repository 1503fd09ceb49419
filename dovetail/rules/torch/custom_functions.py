"""Custom ``autograd.Function``: its forward and backward are interpreted, and the call is one call of the program."""

from __future__ import annotations

import types
from typing import Any

import torch

from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import AttributeSource, Identity

_METHODS = ("forward", "backward", "setup_context", "vjp", "jvp")


class Interpreted:
    """The classes with interpreted methods that stand for the user's in one capture."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter
        self._classes: dict[type, type] = {}

    def of(self, owner: type) -> Any:
        """The class that stands for one of the user's; its methods are guarded."""
        found = self._classes.get(owner)
        if found is None:
            body = {name: method for name in _METHODS if (method := self._method(owner, name)) is not None}
            found = self._classes[owner] = types.new_class(
                owner.__name__, (owner,), {}, lambda names: names.update(body)
            )
        return found

    def _method(self, owner: type, name: str) -> Any:
        method, holder = class_attribute(owner, name)
        inner = method.__func__ if isinstance(method, staticmethod) else method
        is_torchs = holder is None or (holder.__module__ or "").startswith("torch.autograd")
        if holder is None or is_torchs or not isinstance(inner, types.FunctionType):
            return None
        values = self._interpreter.values
        source = AttributeSource(values.pin(holder, holder.__qualname__), name)
        values.read(inner, source)
        if name in ("backward", "vjp"):
            values.note_backward_read(source, Identity(inner), f"{name} was called", always=True)
        return staticmethod(self._interpreter.trampoline(inner))


@rule(torch.autograd.Function.apply.__func__)  # type: ignore[attr-defined]
def _apply(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    owner, *given = args
    recorder = interpreter.trace.recorder
    writes = interpreter.effects.writes
    with recorder.paused():
        # Only its own methods see functions among the arguments.
        result = interpreter.native(interpreter.state(Interpreted).of(owner).apply, tuple(given), kwargs, hands_on=True)
    recorder.record(owner.apply, tuple(given), kwargs, result)
    if interpreter.effects.writes != writes:
        recorder.refuse_replay("a custom autograd.Function in it writes to Python objects")
    return result
