"""Run the frontend on one call: bytecode in; traced outputs, guards, effects and the recipe for the result out."""

from __future__ import annotations

import linecache
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail.aot.descriptors import BufferInput, Descriptor, ParamInput, UserInput
from dovetail.errors import UserLocation
from dovetail.frontend.frame import Break
from dovetail.frontend.interpreter import Interpreter
from dovetail.frontend.values import IDENTITY_TYPES, is_leaf_value
from dovetail.guards import (
    AmbientState,
    ArgumentSource,
    CalleeSource,
    GuardSet,
    Identity,
    InstanceDictSource,
    ItemSource,
    KeywordSource,
    Source,
    TypeIs,
)
from dovetail.runtime.entry import EffectRecipe
from dovetail.runtime.recipe import ConstantItem, Recipe, SourceItem, TensorItem, build_recipe
from dovetail.trace import Program, Trace


@dataclass(frozen=True)
class Capture:
    """What the frontend hands on. ``outputs`` are the traced tensors that leave the function, ``recipe`` builds the result."""

    function: Any
    outputs: tuple[torch.Tensor, ...]
    input_descriptors: tuple[Descriptor, ...]
    recipe: Recipe
    effects: tuple[EffectRecipe, ...]
    guards: GuardSet
    ambient: AmbientState
    program: Program


def argument_names(function: Any, count: int) -> list[str]:
    """What the user calls the positional arguments of a function or module."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    skip = 1 if isinstance(target, types.MethodType) else 0
    target = getattr(target, "__func__", target)
    code = getattr(target, "__code__", None)
    names = list(code.co_varnames[skip : code.co_argcount]) if code is not None else []
    return [f"L[{names[i]!r}]" if i < len(names) else f"args[{i}]" for i in range(count)]


def definition_of(function: Any) -> UserLocation | None:
    """Where a function, or a module's forward, is defined."""
    target = type(function).forward if isinstance(function, torch.nn.Module) else function
    code = getattr(target, "__code__", None)
    if code is None:
        return None
    line = code.co_firstlineno
    return UserLocation(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip())


def describe(source: Source, real: torch.Tensor) -> Descriptor:
    """The descriptor of an input, by where it was read."""
    path: list[str] = []
    step: Source | None = source
    kind = ""
    while isinstance(step, ItemSource) and getattr(step, "base", None) is not None:
        table = step.base
        if isinstance(table, ItemSource) and isinstance(table.base, InstanceDictSource) and isinstance(step.key, str):
            if table.key not in ("_parameters", "_buffers", "_modules"):
                break
            kind = kind or str(table.key)
            path.append(step.key)
            step = table.base.base
            continue
        break
    name = ".".join(reversed(path)) if path and isinstance(step, CalleeSource) else source.name
    if isinstance(real, torch.nn.Parameter):
        return ParamInput(name)
    if kind == "_buffers":
        return BufferInput(name)
    return UserInput(name)


def capture(trace: Trace, guards: GuardSet, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Capture:
    """Interpret one call of ``function`` under an open trace; whatever happens, the user's objects are left as they were.

    Raises :class:`Break` for what cannot be captured, and whatever the user's code raises.
    """
    outside = trace.ambient
    if outside.refuses_capture:
        raise Break(outside.refuses_capture, "call the function outside of that mode")
    inside = AmbientState.snapshot()
    interpreter = Interpreter(trace, guards)
    interpreter.entry_location = definition_of(function)
    values = interpreter.values
    root = CalleeSource()
    values.note(function, root)
    if isinstance(function, types.MethodType):
        raise Break("a bound method is compiled", "compile the function, or the module")
    guards.add(
        root, Identity(function) if isinstance(function, IDENTITY_TYPES) else TypeIs(type(function)), None, "callee"
    )
    guards.set_call_shape(len(args), kwargs)
    try:
        names = argument_names(function, len(args))
        arguments = tuple(values.read(item, ArgumentSource(i, names[i])) for i, item in enumerate(args))
        keywords = {key: values.read(item, KeywordSource(key, f"L[{key!r}]")) for key, item in kwargs.items()}
        result = interpreter.call(function, arguments, keywords)
        outputs: list[torch.Tensor] = []
        positions: dict[int, int] = {}

        def classify(value: Any) -> Recipe | None:
            if isinstance(value, torch.Tensor):
                value = values.wrap(value)
                if id(value) not in positions:
                    positions[id(value)] = len(outputs)
                    outputs.append(value)
                return TensorItem(positions[id(value)])
            if is_leaf_value(value):
                return ConstantItem(value)
            source = values.source_of(value)
            if source is not None:
                return SourceItem(source.fetch)
            if isinstance(value, IDENTITY_TYPES) and not interpreter.is_created(value):
                return ConstantItem(value)
            return None

        recipe = build_recipe(result, classify)
        effects = []
        for effect in interpreter.effects.collect():
            effects.append(
                EffectRecipe(effect.source, effect.kind, build_recipe(effect.values, classify), effect.deleted)
            )
        differences = inside.differences()
        if differences:
            raise Break(
                f"the function changes the state of torch: {differences[0]}", "change it outside of the function"
            )
        for traced in trace.inputs:
            if traced.leaf.grad is not None:
                raise Break("the function calls .backward() itself", "return the loss and call .backward() outside")
            if traced.value.requires_grad != traced.real.requires_grad and traced.value is traced.leaf:
                raise Break("requires_grad of an input is changed", "set it outside of the function")
    finally:
        with private.disable_current_modes():
            interpreter.effects.undo()
    program = trace.program(tuple(outputs))
    descriptors = tuple(describe(guards.tensor_source(item.index), item.real) for item in trace.inputs)
    return Capture(function, tuple(outputs), descriptors, recipe, tuple(effects), guards, outside, program)
