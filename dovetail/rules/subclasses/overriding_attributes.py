"""Attributes of tensors of classes that override torch's functions: their own, the class's, and torch's, which it may override."""

from __future__ import annotations

import types
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.lookup import MISSING, class_attribute, comes_before_the_object
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.values import StandIn
from dovetail.guards import HasNoKey, InstanceDictSource
from dovetail.rules.subclasses.overrides import override_attribute
from dovetail.rules.subclasses.overriding_values import OverridingValue


def load(interpreter: TracingInterpreter, value: OverridingValue, name: str, after: type | None = None) -> Any:
    """``object.__getattribute__(value, name)``; ``after``: as ``super()`` finds it."""
    kind = value.kind
    order = kind.__mro__ if after is None else kind.__mro__[kind.__mro__.index(after) + 1 :]
    owner = next((item for item in order if name in item.__dict__), None)
    found = MISSING if owner is None else owner.__dict__[name]
    interpreter.guard_not_shadowed(kind, owner, name, after)
    if after is None and (owner is None or not comes_before_the_object(found)):
        own = _own_attribute(interpreter, value, name)
        if own is not MISSING:
            return own
    if owner is None:
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name)
    interpreter.guard_class_item(owner, name, found)
    if isinstance(found, (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return types.MethodType(found, value)
    if isinstance(found, classmethod):
        return types.MethodType(found.__func__, kind)
    if isinstance(found, property):
        return interpreter.call(found.fget, (value,), {})
    if isinstance(found, types.GetSetDescriptorType):
        return override_attribute(interpreter, found, value)
    if hasattr(type(found), "__get__") and not isinstance(found, staticmethod):
        raise Break(f"{name} of a {kind.__name__} is read", "read it outside of the function")
    return interpreter.load_attribute(owner, name)


def _own_attributes(interpreter: TracingInterpreter, known: StandIn) -> dict[str, Any]:
    """The dictionary of a tensor that existed before."""
    attributes: dict[str, Any] = object.__getattribute__(known.real, "__dict__")
    interpreter.values.note(attributes, InstanceDictSource(known.source))
    return attributes


def _own_attribute(interpreter: TracingInterpreter, value: OverridingValue, name: str) -> Any:
    """An attribute of the object itself; :data:`MISSING` where it has none of that name."""
    values, known = interpreter.values, interpreter.values.stood_for(value)
    if known is None:
        return value.attributes.get(name, MISSING)
    attributes = _own_attributes(interpreter, known)
    if name in attributes:
        return values.read(attributes[name], values.item_source(attributes, name))
    if not interpreter.effects.written(attributes, name):
        values.guard(InstanceDictSource(known.source), HasNoKey(name), f"{known.source.name} has no {name}")
    return MISSING


def store(interpreter: TracingInterpreter, value: OverridingValue, name: str, item: Any) -> None:
    """``object.__setattr__(value, name, item)``."""
    found, owner = class_attribute(value.kind, name)
    known = interpreter.values.stood_for(value)
    if isinstance(found, property) and found.fset is not None and owner is not None:
        interpreter.guard_class_item(owner, name, found)
        interpreter.call(found.fset, (value, item), {})
    elif hasattr(type(found), "__set__"):
        raise Break(f".{name} of a {value.kind.__name__} is set", "set it outside of the compiled function")
    elif known is None:
        value.attributes[name] = item
    else:
        interpreter.effects.set_item(_own_attributes(interpreter, known), name, item)
