"""Tensors of classes that override torch's functions by ``__torch_function__`` or hold attributes, and are plain tensors otherwise.

The graph has the plain tensor. The program has an
:class:`OverridingValue <dovetail.rules.subclasses.overriding_values.OverridingValue>`; calls of torch that are given one are handed
to its class (:mod:`dovetail.rules.subclasses.overrides`).
"""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.instructions.shared import super_arguments
from dovetail.frontend.interpreter.call_tables import NATIVE_CALLABLES
from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, ValueKind, end_rule, first_rule, rule, value_kind
from dovetail.frontend.values.values import Values
from dovetail.guards import Source, TypeIs
from dovetail.rules.subclasses.overrides import DEFAULT, Overrides, call_plainly, override, own_method
from dovetail.rules.subclasses.overriding_attributes import load, store
from dovetail.rules.subclasses.overriding_values import (
    SPECIAL_CODE,
    OverridingSuper,
    OverridingValue,
    PlainSource,
    remake,
)
from dovetail.runtime.recipe import Recipe
from dovetail.runtime.recipe_builder import RecipeBuilder
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private.tensors import TensorBase


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
        getter, asked = (class_attribute(kind, special)[0] for special in ("__getattribute__", "__getattr__"))
        if name == "__dict__":
            raise Break(f"the dictionary of a {kind.__name__} is read", "read it outside of the function")
        try:
            if isinstance(getter, types.FunctionType):
                return interpreter.call(types.MethodType(getter, value), (name,), {})
            return load(interpreter, value, name)
        except AttributeError:
            if not isinstance(asked, types.FunctionType):
                raise
        return interpreter.call(types.MethodType(asked, value), (name,), {})

    def store(self, interpreter: TracingInterpreter, value: Any, name: str, item: Any) -> None:
        """``value.name = item``."""
        setter = class_attribute(value.kind, "__setattr__")[0]
        if isinstance(setter, types.FunctionType):
            interpreter.call(setter, (value, name, item), {})
        else:
            store(interpreter, value, name, item)

    def call(self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
        """A call of torch, or an operator."""
        return override(interpreter, function, args, kwargs)


class SuperKind(ValueKind):
    """``super()`` in methods of such classes: it is no tensor, and stands for none."""

    def claims(self, real: torch.Tensor) -> bool:
        """No tensor is one."""
        return False

    def holds(self, value: Any) -> bool:
        """No value stands for a tensor."""
        return False

    def attribute(self, interpreter: TracingInterpreter, value: Any, name: str) -> Any:
        """The attribute of the classes that follow the asking one in the order of resolution."""
        return load(interpreter, value.value, name, after=value.start)


# --- calls -----------------------------------------------------------------------------------------------------------


_NATIVE = (*NATIVE_CALLABLES, private_operators.OpOverload, private_operators.OpOverloadPacket)
_PLAIN_SLOTS: dict[str, Any] = {
    "__getattribute__": load,
    "__setattr__": store,
    "__init__": lambda interpreter, value: None,
}
_NEVER_HERE = frozenset(
    {
        *private_libraries.HAS_TORCH_FUNCTION,
        *(torch.overrides.handle_torch_function, DEFAULT, private_libraries.disabled_torch_function),
    }
)


def _special_method(interpreter: TracingInterpreter, name: str, value: Any, args: Arguments) -> Any:
    """A special method that the interpreter found on a stand-in."""
    method = own_method(interpreter, value, name)
    if method is not None:
        return interpreter.call(method, args, {})
    found = getattr(torch.Tensor, name, None)
    if name in ("__len__", "__iter__", "__contains__"):
        return interpreter.call(found, (value, *args), {})
    if name in ("__getitem__", "__setitem__", "__bool__"):
        return override(interpreter, found, (value, *args), {})
    raise Break(f"{name} of a {value.kind.__name__} is asked for", "do this outside of the compiled function")


def _is_given(value: Any) -> bool:
    """Whether a call of torch is handed to classes for this argument: a list of tensors that existed before counts too."""
    for item in value if type(value) in (list, tuple) else (value,):
        kind = type(item)
        if kind is OverridingValue or (isinstance(item, torch.Tensor) and private_libraries.is_plain_inside(kind)):
            return True
    return False


@first_rule
def _override(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    if function is super and len(args) in (0, 2):
        start, value = args or super_arguments(interpreter, interpreter.frames[-1])
        return OverridingSuper(start, value) if type(value) is OverridingValue else NotImplemented
    if not any(map(_is_given, (*args, *kwargs.values()))):
        return NotImplemented
    if type(function) is types.FunctionType:
        return _override_python(interpreter, function, args, kwargs)
    if isinstance(function, torch.jit.ScriptFunction):
        # It asks no class.
        return call_plainly(interpreter, function, args, kwargs)
    if isinstance(function, torch.ScriptMethod):
        raise Break("a scripted method is given a tensor subclass", "hand over x.as_subclass(torch.Tensor)")
    if function in _NEVER_HERE or not isinstance(function, _NATIVE):
        return NotImplemented
    if function is sum and type(args[0]) in (list, tuple):
        start = args[1] if len(args) > 1 else kwargs.get("start", 0)
        return functools.reduce(functools.partial(interpreter.operate, operator.add), interpreter.drain(args[0]), start)
    owner = getattr(function, "__self__", None)
    owner = getattr(function if owner is None else owner, "__objclass__", owner)
    module = getattr(function, "__module__", None) or getattr(owner, "__module__", None) or ""
    if isinstance(function, types.WrapperDescriptorType) and function.__name__ in _PLAIN_SLOTS:
        return _PLAIN_SLOTS[function.__name__](interpreter, *args)
    is_method = isinstance(owner, torch.Tensor) or (isinstance(owner, type) and issubclass(owner, TensorBase))
    if is_method or module.split(".", 1)[0] == "torch" or function in (abs, pow, round, divmod):
        return override(interpreter, function, args, kwargs)
    return NotImplemented


def _override_python(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A Python function of torch's: interpreted, it asks by itself whether there is a class to be asked."""
    function = private_calls.without_dynamo_guard(function)
    if function.__code__ is SPECIAL_CODE:
        return _special_method(interpreter, function.__name__, args[0], args[1:])
    module = function.__globals__.get("__name__") or ""
    if module.split(".", 1)[0] != "torch" or function in _NEVER_HERE:
        return NotImplemented
    is_function_of_users = module == "torch.autograd.function" and function.__name__ == "apply"
    if is_function_of_users or module.startswith(private_libraries.CALLERS):
        raise Break(f"{function.__qualname__} is given a tensor subclass", "hand over x.as_subclass(torch.Tensor)")
    if not interpreter.state(Overrides).asks_classes:
        return call_plainly(interpreter, function, args, kwargs)
    is_asking = "handle_torch_function" in function.__code__.co_names
    return interpreter.run_function(function, args, kwargs) if is_asking or function not in rule else NotImplemented


@end_rule
def _check_changed(interpreter: TracingInterpreter) -> None:
    """Refuse changes of an input that would reach the plain tensor alone."""
    trace = interpreter.trace
    changed = {*interpreter.effects.inputs_made_differentiable, *(item.input_index for item in trace.metadata_changes)}
    for traced in trace.inputs:
        source = interpreter.values.guards.tensor_source(traced.index)
        if not isinstance(source, PlainSource):
            continue
        is_written = trace.node_of(traced.value) is not traced.node
        if traced.index in changed or traced.changes_requires_grad() or (is_written and traced.requires_grad):
            raise Break(f"{traced.name}, a tensor subclass, is changed in place", "make a new tensor instead")


value_kind(OverridingKind(), OverridingValue)
value_kind(SuperKind(), OverridingSuper)
