"""Tensor subclasses that wrap other tensors: their inner tensors are inputs, and a wrapper of traced ones stands in for each."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, ValueKind, attribute_rule, end_rule, rule, value_kind
from dovetail.frontend.values.values import Values
from dovetail.guards import (
    AttributeSource,
    CalleeSource,
    ComputedSource,
    DictKeys,
    Equals,
    InstanceDictSource,
    Source,
    TypeIs,
)
from dovetail.rules.subclasses.wrappers import (
    GradientForm,
    InnerSource,
    Wrapped,
    WrapperMaker,
    WrapperMatch,
    inner_tensor,
    requires_inner_gradient,
)
from dovetail.runtime.origins import origins_of
from dovetail.runtime.recipe import Recipe
from dovetail.runtime.recipe_builder import RecipeBuilder
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private.autograd_nodes import node_name
from dovetail.trace import CaptureSettings, Retry


class SubclassKind(ValueKind):
    """Tensors of classes that say themselves how they are taken apart and built."""

    def claims(self, real: torch.Tensor) -> bool:
        """Whether a tensor wraps others."""
        return private_tensors.is_wrapper(real)

    def holds(self, value: Any) -> bool:
        """Whether a tensor wraps others."""
        return isinstance(value, torch.Tensor) and private_tensors.is_wrapper(value)

    def stand_in(self, values: Values, real: torch.Tensor, source: Source) -> torch.Tensor:
        """A wrapper of the same class around traced tensors."""
        values.guard(source, TypeIs(type(real)), f"{source.name} was read")
        with private_tracing.disable_current_modes():
            maker = WrapperMaker.of(real)
            form = GradientForm()
            inner = {name: inner_tensor(real, name, form) for name in maker.names}
        values.guard(source, WrapperMatch(maker, real.requires_grad), f"{source.name} was read")
        parts = [values.read(item, InnerSource(source, name, form)) for name, item in inner.items()]
        # What has been set on it, and what was not: the stand-in has the parts only.
        values.guard(InstanceDictSource(source), DictKeys(tuple(real.__dict__)), f"{source.name} was read")
        for name in {*maker.names, *real.__dict__}:
            if name not in attribute_rule:
                attribute_rule(name)(_attribute)
        if private_distributed.is_pending(real):
            # A plain tensor that is awaited: to the program they are the same, and so are their gradients.
            return parts[0]  # type: ignore[no-any-return]
        with torch.enable_grad():
            traced: torch.Tensor = maker(*parts, form=form)
        if private_sizes.has_symbols(traced):
            reason = f"{source.name} is a tensor subclass of a symbolic size"
            raise Retry(reason, change=CaptureSettings.with_fewer_symbols)
        return traced

    def example(self, values: Values, value: Any) -> torch.Tensor:
        """The tensor that was read, or the wrapper itself."""
        known = values.stood_for(value)
        return value if known is None else known.real  # type: ignore[no-any-return]

    def leave(self, interpreter: TracingInterpreter, builder: RecipeBuilder, value: Any) -> Recipe:
        """Its inner tensors leave the graph, and it is built again outside."""
        if value.requires_grad and value.is_leaf:
            raise CaptureError(
                f"a {type(value).__name__} that the function makes with requires_grad is returned",
                where=interpreter.locate(),
                advice="make it outside of the function",
            )
        maker = WrapperMaker.of(value)
        inner = [inner_tensor(value, name) for name in maker.names]
        known = {private_libraries.storage_key(item.value.untyped_storage()) for item in interpreter.trace.inputs}
        if value._base is not None or any(
            not private_tensors.is_wrapper(item) and private_libraries.storage_key(item.untyped_storage()) in known
            for item in inner
        ):
            raise CaptureError(
                f"a {type(value).__name__} that shares memory with another tensor is returned",
                where=interpreter.locate(),
                advice="return a clone of it",
            )
        return builder.made(value, maker, inner)


def _attribute(interpreter: TracingInterpreter, target: torch.Tensor, name: str) -> Any:
    """Read what was set on an input from it; an inner tensor with a gradient of its own is no leaf that the graph knows."""
    known = interpreter.values.stood_for(target)
    is_set = name in interpreter.values.tensor_attributes.get(id(target), (target, {}))[1]
    if known is None or is_set or not private_tensors.is_wrapper(known.real):
        return NotImplemented
    if name in known.real.__dict__ and name not in target.__dict__:
        return interpreter.values.read(known.real.__dict__[name], AttributeSource(known.source, name))
    question = ComputedSource(
        requires_inner_gradient, (known.source, name), f"whether {known.source.name}.{name} requires a gradient"
    )
    if requires_inner_gradient(known.real, name):
        raise Break(f"{known.source.name}.{name} requires a gradient by itself", "read it outside of the function")
    interpreter.values.guard(question, Equals(False), f"{known.source.name}.{name} was read")
    return NotImplemented


@attribute_rule("is_leaf")
def _is_leaf(interpreter: TracingInterpreter, target: torch.Tensor, name: str) -> Any:
    """The stand-in of a parameter is none, as it is made of inner tensors."""
    known = interpreter.values.stood_for(target)
    if known is None:
        return NotImplemented
    source, answer = AttributeSource(known.source, name), known.real.is_leaf
    interpreter.values.guard(source, Equals(answer), f"{source.name} was read")
    return answer


@end_rule
def _set_attributes(interpreter: TracingInterpreter) -> None:
    """Attributes that the program set on its inputs are set on the wrappers. Wrappers that it has made are built again without."""
    values = interpreter.values
    for target, attributes in values.tensor_attributes.values():
        if not private_tensors.is_wrapper(target):
            continue
        known = values.stood_for(target)
        if known is None or not attributes.keys().isdisjoint(target.__dict__):
            raise Break(f"{', '.join(attributes)} of a {type(target).__name__} is set", "set it in eager code")
        values.note(known.real.__dict__, InstanceDictSource(known.source))
        for name, value in attributes.items():
            interpreter.effects.set_item(known.real.__dict__, name, value)


#: The autograd node of a stand-in that has not been written to where gradients are recorded.
_NODE = f"{Wrapped.__name__}Backward"


@end_rule
def _check_written(interpreter: TracingInterpreter) -> None:
    """Refuse writes to inner tensors where the wrapper might keep other things that follow from them. A DTensor keeps none."""
    trace, values = interpreter.trace, interpreter.values
    written = []
    for traced in trace.inputs:
        is_part = isinstance(values.guards.tensor_source(traced.index), InnerSource)
        if not is_part or trace.node_of(traced.value) is traced.node:
            continue
        ((wrapper, *_), *outer) = origins_of(traced.real)
        known = None if outer else values.stood_for(values.wrap(wrapper))
        if known is None or not private_distributed.is_spread(wrapper):
            raise Break(f"{traced.name}, a part of a tensor subclass, is written to", "make a new tensor instead")
        node = known.value.grad_fn
        if known.value.requires_grad is not wrapper.requires_grad or not (node is None or node_name(node) == _NODE):
            raise Break(
                f"{known.source.name} is written to where gradients are recorded", "write under torch.no_grad()"
            )
        written.append(known.value)
    if written:
        # Autograd counts writes to the wrapper by itself.
        effect = Effect(CalleeSource(), "call", [torch.autograd.graph.increment_version, [written], {}])
        interpreter.effects.defer(lambda: [effect])


@rule(WrapperMaker.build)
def _build(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> torch.Tensor:
    # The edge of another graph, in a captured backward. A class says itself how it is built of inner tensors: as with those
    # that are inputs, its code is not looked into.
    maker, inner = args
    return maker.build(inner)  # type: ignore[no-any-return]


value_kind(SubclassKind())
