"""Attributes of ``threading.local`` objects: read again at each call, in the thread of the call."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import attribute_rule
from dovetail.guards.source import Step

_load = threading.local.__getattribute__


@dataclass(frozen=True)
class OfThisThread(Step):
    """An attribute that the running thread has given a thread-local object. Nobody may remember what another thread has read."""

    attribute: str

    @property
    def name(self) -> str:
        """As the program writes it."""
        return f"{self.base.name}.{self.attribute}"

    def read(self, value: Any) -> Any:
        """The attribute of the thread that asks; raises KeyError where it has none."""
        if not isinstance(value, threading.local):
            raise TypeError("no thread-local object")
        return _load(value, "__dict__")[self.attribute]


@attribute_rule(threading.local)
def _attribute(interpreter: TracingInterpreter, target: Any, name: Any) -> Any:
    """Guard what this thread has set; what is found elsewhere, or nowhere, breaks the graph."""
    source = interpreter.values.source_of(target)
    own = _load(target, "__dict__")
    if source is None or name not in own:
        raise Break("an attribute of a thread-local object is read", "read it outside, and hand its value on")
    return interpreter.values.read(own[name], OfThisThread(source, name))
