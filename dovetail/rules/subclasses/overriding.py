"""Tensors of classes that override torch's functions by ``__torch_function__`` or hold attributes, and are plain tensors otherwise.

The graph has the plain tensor. The program has an
:class:`OverridingValue <dovetail.rules.subclasses.overriding_values.OverridingValue>`; calls of torch that are given one are handed
to its class (:mod:`dovetail.rules.subclasses.overrides`).
"""

from __future__ import annotations

import types
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.lookup import MISSING, class_attribute, comes_before_the_object, instance_dict
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, ValueKind, end_rule, value_kind
from dovetail.frontend.values.values import StandIn, Values
from dovetail.guards import HasNoKey, InstanceDictSource, Source, TypeIs
from dovetail.rules.subclasses.overrides import override, override_attribute
from dovetail.rules.subclasses.overriding_values import OverridingValue, PlainSource, remake
from dovetail.runtime.recipe import Recipe
from dovetail.runtime.recipe_builder import RecipeBuilder
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import tracing as private_tracing


class OverridingKind(ValueKind):
    """Tensors of classes that override torch's functions, or add attributes and methods, and nothing else."""

    def claims(self, real: torch.Tensor) -> bool:
        """Whether a strided tensor's class is one of these."""
        return private_libraries.is_plain_inside(type(real)) and real.layout is torch.strided and not real.is_quantized

    def holds(self, value: Any) -> bool:
        """Whether this is a stand-in."""
        return type(value) is OverridingValue

    def stand_in(self, values: Values, real: torch.Tensor, source: Source) -> OverridingValue:
        """A stand-in with the plain tensor for an input."""
        if values.in_backward:
            raise Break(f"a hook or the backward of a custom autograd.Function reads {source.name}, a tensor subclass")
        values.guard(source, TypeIs(type(real)), f"{source.name} was read")
        at = PlainSource(source)
        with private_tracing.disable_current_modes():
            plain = at.read(real)
        return OverridingValue(type(real), values.read(plain, at), {})

    def example(self, values: Values, value: Any) -> torch.Tensor:
        """The tensor that was read, or one of the same class."""
        known = values.stood_for(value)
        if known is not None:
            return known.real
        with private_tracing.disable_current_modes():
            return remake(value.kind, torch.empty(0), {})

    def leave(self, interpreter: TracingInterpreter, builder: RecipeBuilder, value: Any) -> Recipe:
        """It is made of the plain tensor when the graph has run."""
        if value.tensor.requires_grad and value.tensor.is_leaf and interpreter.trace.input_of(value.tensor) is None:
            raise CaptureError(
                f"a {value.kind.__name__} that the function makes with requires_grad is returned",
                where=interpreter.locate(),
                advice="make it outside of the function",
            )
        return builder.made(value, remake, [value.kind, value.tensor, value.attributes])

    def attribute(self, interpreter: TracingInterpreter, value: Any, name: str) -> Any:
        """An attribute of the user's class or of the object, or one of torch's, which the class may override."""
        kind = value.kind
        if name == "__class__":
            return kind
        if name == "__dict__" or isinstance(class_attribute(kind, "__getattribute__")[0], types.FunctionType):
            raise Break(f"{name} of a {kind.__name__} is read", "read it outside of the function")
        found, owner = class_attribute(kind, name)
        interpreter.guard_not_shadowed(kind, owner, name)
        if owner is None or not comes_before_the_object(found):
            own = _own_attribute(interpreter, value, name)
            if own is not MISSING:
                return own
        if owner is None:
            getter, _ = class_attribute(kind, "__getattr__")
            if isinstance(getter, types.FunctionType):
                return interpreter.call(types.MethodType(getter, value), (name,), {})
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name)
        if isinstance(found, (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
            interpreter.guard_class_item(owner, name, found)
            return types.MethodType(found, value)
        if isinstance(found, property):
            interpreter.guard_class_item(owner, name, found)
            return interpreter.call(found.fget, (value,), {})
        if isinstance(found, types.GetSetDescriptorType):
            return override_attribute(interpreter, found, value)
        if hasattr(type(found), "__get__") and not isinstance(found, (staticmethod, classmethod)):
            raise Break(f"{name} of a {kind.__name__} is read", "read it outside of the function")
        return interpreter.load_attribute(kind, name)

    def store(self, interpreter: TracingInterpreter, value: Any, name: str, item: Any) -> None:
        """``value.name = item``."""
        found, owner = class_attribute(value.kind, name)
        setter, known = class_attribute(value.kind, "__setattr__")[0], interpreter.values.stood_for(value)
        if isinstance(setter, types.FunctionType):
            interpreter.call(setter, (value, name, item), {})
        elif isinstance(found, property) and found.fset is not None and owner is not None:
            interpreter.guard_class_item(owner, name, found)
            interpreter.call(found.fset, (value, item), {})
        elif hasattr(type(found), "__set__"):
            raise Break(f".{name} of a {value.kind.__name__} is set", "set it outside of the compiled function")
        elif known is None:
            value.attributes[name] = item
        else:
            interpreter.effects.set_item(_own_attributes(interpreter, known), name, item)

    def call(self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
        """A call of torch, or an operator."""
        return override(interpreter, function, args, kwargs)


def _own_attributes(interpreter: TracingInterpreter, known: StandIn) -> dict[str, Any]:
    """The dictionary of a tensor that existed before."""
    attributes = instance_dict(known.real) or {}
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


@end_rule
def _check_changed(interpreter: TracingInterpreter) -> None:
    """Refuse changes of an input that would reach the plain tensor alone."""
    trace = interpreter.trace
    changed = {change.input_index for change in trace.metadata_changes}
    for traced in trace.inputs:
        source = interpreter.values.guards.tensor_source(traced.index)
        if not isinstance(source, PlainSource):
            continue
        is_written = trace.node_of(traced.value) is not traced.node
        if traced.index in changed or traced.changes_requires_grad() or (is_written and traced.requires_grad):
            raise Break(f"{traced.name}, a tensor subclass, is changed in place", "make a new tensor instead")


value_kind(OverridingKind(), OverridingValue)
