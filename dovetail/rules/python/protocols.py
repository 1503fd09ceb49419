"""``isinstance`` with a ``typing.Protocol``: what it looks for on the object is read, and so guarded, member by member."""

from __future__ import annotations

import sys
import types
import typing
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.lookup import MISSING, class_attribute, instance_dict
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import instance_rule
from dovetail.guards import Answers


def is_protocol(kind: type) -> bool:
    """Whether a class is a protocol itself, and not one that inherits from it.

    >>> is_protocol(typing.SupportsInt), is_protocol(int)
    (True, False)
    """
    return bool(vars(kind).get("_is_protocol", False)) and kind is not typing.Protocol


def _members(protocol: type) -> set[str]:
    return set(typing._get_protocol_attrs(protocol))  # type: ignore[attr-defined]


@instance_rule(type(typing.Protocol))
def look_for_members(interpreter: TracingInterpreter, value: Any, protocol: type) -> None:
    """Guard everything that decides whether an object has the members of a protocol."""
    if not is_protocol(protocol):
        interpreter.guard_registration(type(value), protocol)
        return
    kind = type(value)
    for name in sorted(_members(protocol)):
        found, _ = class_attribute(kind, name)
        is_on_class_only = name not in (instance_dict(value) or {})
        # From Python 3.12 on, no code of the object's class is run for the answer; before, properties and __getattr__ are.
        if is_on_class_only and sys.version_info >= (3, 12) and not isinstance(found, types.FunctionType):
            asked = Answers(hasattr, (name,), found is not MISSING)
            reason = f"whether {kind.__qualname__} has a member of {protocol.__qualname__} was asked"
            interpreter.values.guard(interpreter.values.pin(kind, kind.__qualname__), asked, reason)
            if found is not MISSING:
                continue
            if class_attribute(kind, "__getattr__")[0] is not MISSING:
                reason = f"isinstance looks for {name} of a {kind.__qualname__} object past its __getattr__"
                raise Break(reason, "ask for the attribute itself, or do this outside of the function")
        try:
            interpreter.load_attribute(value, name)
        except AttributeError:
            return
