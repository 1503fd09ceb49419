"""Calls: follow a rule, interpret a function, run native code under the trace's modes, or break the graph."""

from __future__ import annotations

import enum
import functools
import types
import typing
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame
from dovetail.frontend.interpreter.call_tables import (
    NATIVE_CALLABLES,
    OWN_MODULES,
    PURE_MODULES,
    check_loading,
    runs_natively,
)
from dovetail.frontend.interpreter.lookup import MISSING, class_attribute, instance_dict
from dovetail.frontend.interpreter.opaque import check_opaque
from dovetail.frontend.interpreter.user_code import calls_user_code
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import (
    Arguments,
    Instead,
    Keywords,
    callable_rule,
    called_rule,
    class_rule,
    first_rule,
    format_rule,
    interpreted_rule,
    rule,
    wrapper_rule,
)
from dovetail.guards import AttributeSource, Identity, InstanceDictSource, Length, NoHooks
from dovetail.guards.container_predicate import CALL_IMPL
from dovetail.guards.reading import class_order
from dovetail.runtime.recipe_builder import interpreted_of
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes

_WITH_RULES = (types.BuiltinFunctionType, type, types.FunctionType, types.MethodDescriptorType, type(type.__call__))
_MODULE_CALL = torch.nn.Module.__call__
_PARTIAL_CALL = functools.partial.__call__
_OPERATORS = (private_operators.OpOverload, private_operators.OpOverloadPacket)


class Calls(TracingInterpreter):
    """The part of the interpreter that decides what a call does."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False) -> Any:
        for ask in first_rule:
            if (result := ask(self, function, args, kwargs)) is not NotImplemented:
                return result
        known = rule.get(function) if isinstance(function, _WITH_RULES) else None
        if known is not None:
            found = known(self, args, kwargs)
            return found if type(found) is not Instead else self.call(found.function, found.args, found.kwargs, direct)
        kind = type(function)
        if kind is types.FunctionType or isinstance(function, torch.nn.Module):
            for wrapping in wrapper_rule:
                if (inside := wrapping(self, function, args, kwargs)) is not None:
                    return self.call(inside.function, inside.args, inside.kwargs, direct)
        if kind is types.FunctionType:
            return self._call_function(function, args, kwargs, direct)
        if kind is types.MethodType:
            return self._call_method(function, args, kwargs, direct)
        if isinstance(function, torch.nn.Module):
            return self.call_module(function, args, kwargs, direct)
        if isinstance(function, type):
            return self.call_class(function, args, kwargs)
        if isinstance(function, NATIVE_CALLABLES):
            return self.call_native(function, args, kwargs)
        if (handler := callable_rule.get(kind)) is not None:
            return handler(self, function, args, kwargs)
        return self._call_object(function, args, kwargs, direct)

    def _call_function(
        self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool
    ) -> Any:
        """A Python function."""
        inside = private_calls.without_dynamo_guard(interpreted_of(function))
        if inside is not function:
            return self.call(inside, args, kwargs, direct)
        module = function.__globals__.get("__name__") or ""
        if module.startswith(OWN_MODULES):
            # A method of the interpreter's own generators and iterators; one that existed before must not be advanced.
            for item in args:
                check_opaque(self.values, function, item)
            return self.values.wrap(function(*args, **kwargs))
        check_loading(module)
        if calls_user_code(function) or any(handler(function, args, kwargs) for handler in interpreted_rule):
            return self.run_function(function, args, kwargs, direct)
        return self.call_guarded(function, args, kwargs)

    def call_guarded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.call_torch(function, args, kwargs)
        for guard in called_rule:
            guard(self, function, args, kwargs, result)
        return result

    def _call_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool) -> Any:
        owner = method.__self__
        if (source := self.values.source_of(method)) is not None:
            self.values.guard(AttributeSource(source, "__func__"), Identity(method.__func__), "the method was called")
            owner = self.values.read(owner, AttributeSource(source, "__self__"))
        return self.call(method.__func__, (owner, *args), kwargs, direct)

    def _call_partial(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool) -> Any:
        names = ("func", "args", "keywords")
        if self.values.source_of(function) is None:
            # A subclass may have other attributes under these names.
            inner, bound, named = (vars(functools.partial)[name].__get__(function) for name in names)
            return self.call(inner, bound + args, {**named, **kwargs}, direct)
        inner, bound, named = (self.load_attribute(function, name) for name in names)
        self.guard_length(bound)
        self.guard_length(named)
        items = tuple(self.load_item(bound, position) for position in range(len(bound)))
        keywords = {key: self.load_item(named, key) for key in named}
        return self.call(inner, items + args, {**keywords, **kwargs}, direct)

    def _call_object(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool) -> Any:
        """An object that is no function, class or module."""
        kind = type(function)
        is_torchs = kind.__module__.startswith("torch.") and runs_natively(kind.__module__)
        if isinstance(function, _OPERATORS) or (is_torchs and not isinstance(function, torch.Tensor)):
            return self.call_torch(function, args, kwargs)
        caller, _ = class_attribute(kind, "__call__")
        if isinstance(caller, types.FunctionType):
            return self.call(types.MethodType(caller, function), args, kwargs, direct)
        if caller is _PARTIAL_CALL and (kind is functools.partial or self.values.source_of(function) is None):
            return self._call_partial(function, args, kwargs, direct)
        if caller is MISSING:
            raise TypeError(f"{self.call(type, (function,), {}).__name__!r} object is not callable")
        if kind.__module__ in ("typing", "types"):
            if (source := self.values.source_of(function)) is not None:
                self.values.guard(source, Identity(function), f"{source.name} was called")
            return self.call_native(function, args, kwargs)
        raise Break(f"a {kind.__module__}.{kind.__qualname__} object is called", "call it outside of the function")

    def formatted(self, frame: Frame, value: Any, specification: str) -> str:
        if private_sizes.is_symbolic(value):
            for handler in format_rule:
                if (text := handler(self, frame, value, specification)) is not NotImplemented:
                    return text
        return self.call(format, (value, specification), {})  # type: ignore[no-any-return]

    # --- modules ------------------------------------------------------------------------------------------------------

    def call_module(self, module: torch.nn.Module, args: Arguments, kwargs: Keywords, direct: bool = False) -> Any:
        """``module(*args, **kwargs)``: straight to ``forward`` where there are no hooks, which is guarded."""
        caller, owner = class_attribute(type(module), "__call__")
        if owner is not None:
            self.guard_class_item(owner, "__call__", caller)
        caller = private_calls.called_by_graph_module(module, caller)
        if caller is not _MODULE_CALL:
            return self.call(types.MethodType(caller, module), args, kwargs, direct)
        return self.call_plain_module(module, args, kwargs, direct)

    def call_plain_module(
        self, module: torch.nn.Module, args: Arguments, kwargs: Keywords, direct: bool = False
    ) -> Any:
        inside, owner = class_attribute(type(module), CALL_IMPL)
        self.guard_class_item(owner or torch.nn.Module, CALL_IMPL, inside)
        if CALL_IMPL in (instance_dict(module) or {}) or inside is not private_calls.MODULE_CALL_IMPL:
            return self.call(self.load_attribute(module, CALL_IMPL), args, kwargs, direct)
        return self.call_module_impl(module, args, kwargs, direct)

    def call_module_impl(self, module: torch.nn.Module, args: Arguments, kwargs: Keywords, direct: bool = False) -> Any:
        attributes = instance_dict(module) or {}
        everywhere = private_calls.global_module_hooks()
        for name, hooks in everywhere.items():
            self.values.guard(self.values.pin(hooks, name), Length(len(hooks)), "global module hooks")
        found = [attributes.get("_backward_hooks"), attributes.get("_backward_pre_hooks")]
        if any([*found, *(hooks for name, hooks in everywhere.items() if "backward" in name)]):
            raise Break("a module has backward hooks", "register the hooks on tensors, or run this module outside")
        if any(everywhere.values()) or attributes.get("_forward_hooks") or attributes.get("_forward_pre_hooks"):
            return self.run_function(private_calls.MODULE_CALL_IMPL, (module, *args), kwargs, direct)
        if (source := self.values.source_of(module)) is not None:
            self.values.guard(InstanceDictSource(source), NoHooks(), f"{source.name} has no hooks")
        return self.call(self.load_attribute(module, "forward"), args, kwargs, direct)

    # --- classes ------------------------------------------------------------------------------------------------------

    def call_class(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make an instance."""
        meta_call, _ = class_attribute(type(kind), "__call__")
        if isinstance(meta_call, types.FunctionType) and not isinstance(kind, enum.EnumMeta):
            if (kind.__module__ or "").startswith("torch"):
                return self.call_torch(kind, args, kwargs)
            return self.call(meta_call, (kind, *args), kwargs)
        return self.make_instance(kind, args, kwargs)

    def make_instance(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if issubclass(kind, type):
            raise Break("a class is defined", "define the class outside of the function")
        maker, _ = class_attribute(kind, "__new__")
        maker = maker.__func__ if isinstance(maker, staticmethod) else maker
        starter, starter_owner = class_attribute(kind, "__init__")
        is_made_by_python = isinstance(maker, types.FunctionType) or maker is torch.Tensor.__new__
        is_native = not is_made_by_python and not isinstance(starter, types.FunctionType)
        if isinstance(kind, enum.EnumMeta) or (is_native and issubclass(kind, BaseException)):
            return self.call_native(kind, args, kwargs)
        module = kind.__module__ or ""
        check_loading(module)
        for check in class_rule:
            check(kind)
        if runs_natively(module) and not issubclass(kind, torch.nn.Module):
            return self.call_torch(kind, args, kwargs)
        if is_native:
            is_pure = module in (*PURE_MODULES, "contextlib", "dataclasses") or kind is typing.Any
            if is_pure or starter_owner is object or issubclass(kind, (dict, list, tuple, set)):
                return self.call_native(kind, args, kwargs)
            raise Break(f"an object of {module}.{kind.__qualname__} is made", "make it outside of the function")
        if is_made_by_python:
            instance = self.call(maker, (kind, *args), kwargs)
            if kind not in class_order(made := self.call(type, (instance,), {})):
                return instance
        elif maker is object.__new__:
            instance = object.__new__(kind)
        else:
            immutable = issubclass(kind, (tuple, frozenset, str, int, float, BaseException, functools.partial))
            given = [self.values.for_native(item) for item in args] if immutable else ()
            instance = self.values.wrap(kind.__new__(kind, *given))
        if is_made_by_python:
            # Of a class that derives from this one, maybe.
            starter, starter_owner = class_attribute(made, "__init__")
        if isinstance(starter, types.FunctionType):
            self.call(starter, (instance, *args), kwargs)
        elif starter_owner is not object:
            self.call_native(starter, (instance, *args), kwargs)
        return instance
