"""Attributes as they stand in class and instance dictionaries, read without running any code of the program's."""

from __future__ import annotations

import types
from typing import Any

from dovetail.frontend.interpreter.call_tables import runs_natively

MISSING = object()


def class_attribute(kind: type, name: str) -> tuple[Any, type | None]:
    """The attribute as it stands in the class dictionaries, and the class that has it."""
    for owner in kind.__mro__:
        if name in owner.__dict__:
            return owner.__dict__[name], owner
    return MISSING, None


def instance_dict(target: Any) -> dict[str, Any] | None:
    """An object's own dictionary."""
    try:
        found = object.__getattribute__(target, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def python_descriptor(found: Any, method: str) -> types.FunctionType | None:
    """``__get__``, ``__set__`` or ``__delete__`` of a descriptor, if it is written in Python."""
    function, _ = class_attribute(type(found), method)
    return function if isinstance(function, types.FunctionType) else None


def python_method(value: Any, name: str) -> types.FunctionType | None:
    """A special method that is Python code to interpret, or None."""
    method, _ = class_attribute(type(value), name)
    if isinstance(method, types.FunctionType) and not runs_natively(method.__globals__.get("__name__") or ""):
        return method
    return None


def has_native_method(value: Any, name: str) -> bool:
    """Whether a special method is native code that does more than ``object`` does."""
    method, owner = class_attribute(type(value), name)
    return method is not MISSING and owner is not object and python_method(value, name) is None
