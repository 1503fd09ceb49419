"""What a call does: inline, run natively under the trace's modes, follow a rule of its own, or break."""

from __future__ import annotations

import enum
import functools
import types
import typing
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.finalizers import check_made
from dovetail.frontend.interpreter.attributes import MISSING, class_attribute, instance_dict
from dovetail.frontend.interpreter.call_tables import (
    INTERPRETED_GENERATORS,
    NATIVE_CALLABLES,
    OWN_MODULES,
    PURE_MODULES,
    calls_user_code,
    check_loading,
    is_method_of_users_class,
    is_overridable,
    runs_natively,
    wraps_user_code,
)
from dovetail.frontend.interpreter.native_calls import NativeCalls
from dovetail.frontend.interpreter.shown_names import shown_name
from dovetail.frontend.rules import CALLABLES, CALLS, FORMATS
from dovetail.guards import (
    AttributeSource,
    Identity,
    InstanceDictSource,
    Length,
    NoHooks,
)
from dovetail.runtime.recipe_builder import interpreted_of
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes


class Calls(NativeCalls):
    """The part of the interpreter that decides what a call does."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False) -> Any:
        """Call anything. ``direct``: the caller does nothing with the result but push it on the stack of its frame."""
        rule = (
            CALLS.get(function) if isinstance(function, (types.BuiltinFunctionType, type, types.FunctionType)) else None
        )
        if rule is not None:
            return rule(self, args, kwargs)
        kind = type(function)
        if kind is types.FunctionType:
            interpreted = private_calls.without_dynamo_guard(interpreted_of(function))
            if interpreted is function:
                interpreted = private_calls.without_torch_compile(function)
            if interpreted is not function:
                return self.call(interpreted, args, kwargs, direct)
            if (function.__globals__.get("__name__") or "").startswith(OWN_MODULES):
                # A method of the interpreter's own generators and iterators; one that existed before must not be advanced.
                for item in args:
                    self._check_opaque(function, item)
                return self.values.wrap(function(*args, **kwargs))
            check_loading(function.__globals__.get("__name__"))
            if function.__module__ == "dovetail.face.compile" and function.__name__ in (
                "compile",
                "capture",
                "explain",
            ):
                raise Break(
                    f"dovetail.{function.__name__} is called inside of a compiled function",
                    "call it outside: what a compiled function calls is compiled along with it",
                )
            if (
                runs_natively(function.__globals__.get("__name__") or "")
                and function not in INTERPRETED_GENERATORS
                and not wraps_user_code(function)
                and not (is_overridable(function) and any(map(calls_user_code, (*args, *kwargs.values()))))
                and not is_method_of_users_class(function, args)
            ):
                return self.call_torch(function, args, kwargs)
            return self.run_function(function, args, kwargs, direct)
        if kind is types.MethodType:
            return self._call_method(function, args, kwargs, direct)
        if isinstance(function, torch.nn.Module):
            return self.call_module(function, args, kwargs, direct)
        if kind is functools.partial:
            return self._call_partial(function, args, kwargs, direct)
        if isinstance(function, type):
            return self.call_class(function, args, kwargs)
        if isinstance(function, NATIVE_CALLABLES):
            return self.call_native(function, args, kwargs)
        if isinstance(function, (private_operators.OpOverload, private_operators.OpOverloadPacket)) or (
            kind.__module__.startswith("torch.")
            and runs_natively(kind.__module__)
            and not isinstance(function, torch.Tensor)
        ):
            return self.call_torch(function, args, kwargs)
        handler = CALLABLES.get(kind)
        if handler is not None:
            return handler(self, function, args, kwargs)
        caller, _ = class_attribute(kind, "__call__")
        if isinstance(caller, types.FunctionType):
            return self.call(types.MethodType(caller, function), args, kwargs, direct)
        if caller is MISSING:
            raise TypeError(f"{shown_name(function)!r} object is not callable")
        if kind.__module__ in ("typing", "types", "operator", "functools"):
            source = self.values.source_of(function)
            if source is not None:
                self.values.guard(source, Identity(function), f"{source.name} was called")
            return self.call_native(function, args, kwargs)
        raise Break(f"a {kind.__module__}.{kind.__qualname__} object is called", "call it outside of the function")

    def formatted(self, frame: Any, value: Any, specification: str) -> str:
        """``format(value, specification)``, which is pushed next."""
        if private_sizes.is_symbolic(value):
            for handler in FORMATS:
                found = handler(self, frame, value)
                if found is not NotImplemented:
                    value = found
                    break
        return self.call(format, (value, specification), {})  # type: ignore[no-any-return]

    def _call_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool) -> Any:
        owner = method.__self__
        source = self.values.source_of(method)
        if source is not None:
            self.values.guard(
                AttributeSource(source, "__func__"), Identity(method.__func__), f"{source.name} was called"
            )
            owner = self.values.read(owner, AttributeSource(source, "__self__"))
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and method.__name__ == "apply":
            return self._call_autograd_function(owner, args, kwargs)
        return self.call(method.__func__, (owner, *args), kwargs, direct)

    def _call_partial(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool) -> Any:
        source = self.values.source_of(function)
        inner = self.load_attribute(function, "func")
        if source is None:
            return self.call(inner, function.args + args, {**function.keywords, **kwargs}, direct)
        bound = self.load_attribute(function, "args")
        bound_kwargs = self.load_attribute(function, "keywords")
        self.values.whole(bound)
        self.values.whole(bound_kwargs)
        items = tuple(self.values.wrap(item) for item in bound)
        keywords = {key: self.values.wrap(item) for key, item in bound_kwargs.items()}
        return self.call(inner, items + args, {**keywords, **kwargs}, direct)

    # --- modules ------------------------------------------------------------------------------------------------------

    def call_module(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        """``module(*args, **kwargs)``: straight to ``forward`` where there are no hooks, which is guarded."""
        if private_calls.without_torch_compile(module) is not module:
            return self._call_optimized(module, args, kwargs, direct)
        caller, _ = class_attribute(type(module), "__call__")
        if caller is not torch.nn.Module.__call__ and not private_calls.is_graph_module_call(module, caller):
            return self.call(types.MethodType(caller, module), args, kwargs, direct)
        return self.call_plain_module(module, args, kwargs, direct)

    def _call_optimized(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool
    ) -> Any:
        """A module that ``torch.compile`` has wrapped is compiled here as what it was made of."""
        attributes = instance_dict(module) or {}
        if any(attributes.get(name) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")):
            raise Break("a module that torch.compile made has hooks", "register them on the module that it was made of")
        source = self.values.source_of(module)
        if source is not None:
            self.values.guard(InstanceDictSource(source), NoHooks(), f"{source.name} has no hooks")
        return self.call(self.load_attribute(module, "_orig_mod"), args, kwargs, direct)

    def call_plain_module(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        """``torch.nn.Module.__call__(module, ...)``, whatever the module's own class makes of a call."""
        attributes = instance_dict(module) or {}
        if attributes.get("_backward_hooks") or attributes.get("_backward_pre_hooks"):
            raise Break("a module has backward hooks", "register the hooks on tensors, or run this module outside")
        for name, hooks in private_calls.global_module_hooks().items():
            self.values.guard(self.values.pin(hooks, name), Length(len(hooks)), "global module hooks")
        has_global = any(private_calls.global_module_hooks().values())
        if has_global or attributes.get("_forward_hooks") or attributes.get("_forward_pre_hooks"):
            return self.run_function(private_calls.module_call_with_hooks(), (module, *args), kwargs, direct)
        source = self.values.source_of(module)
        if source is not None:
            self.values.guard(InstanceDictSource(source), NoHooks(), f"{source.name} has no hooks")
        return self.call(self.load_attribute(module, "forward"), args, kwargs, direct)

    # --- classes ------------------------------------------------------------------------------------------------------

    def call_class(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make an instance."""
        meta_call, _ = class_attribute(type(kind), "__call__")
        if isinstance(meta_call, types.FunctionType) and not isinstance(kind, enum.EnumMeta):
            if not (kind.__module__ or "").startswith("torch"):
                return self.call(meta_call, (kind, *args), kwargs)
            return self.call_torch(kind, args, kwargs)
        return self.make_instance(kind, args, kwargs)

    def make_instance(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``type.__call__`` does."""
        if issubclass(kind, type):
            return self.make_class(kind, args, kwargs)
        module = kind.__module__ or ""
        if isinstance(kind, enum.EnumMeta) or issubclass(kind, BaseException):
            return self.call_native(kind, args, kwargs)
        check_loading(module)
        check_made(kind)
        maker, _ = class_attribute(kind, "__new__")
        starter, starter_owner = class_attribute(kind, "__init__")
        if runs_natively(module) and not issubclass(kind, torch.nn.Module):
            return self.call_torch(kind, args, kwargs)
        maker = maker.__func__ if isinstance(maker, staticmethod) else maker
        if not isinstance(maker, types.FunctionType) and not isinstance(starter, types.FunctionType):
            if module in PURE_MODULES or kind in (typing.Any,) or module in ("contextlib", "dataclasses"):
                return self.call_native(kind, args, kwargs)
            if (
                isinstance(starter, types.FunctionType)
                or starter_owner is object
                or issubclass(kind, (dict, list, tuple, set))
            ):
                return self.call_native(kind, args, kwargs)
            raise Break(f"an object of {module}.{kind.__qualname__} is made", "make it outside of the function")
        if isinstance(maker, types.FunctionType):
            instance = self.call(maker, (kind, *args), kwargs)
            if not isinstance(instance, kind):
                return instance
        elif maker is object.__new__:
            instance = object.__new__(kind)
        else:
            immutable = issubclass(kind, (tuple, frozenset, str, int, float))
            build: Any = kind.__new__
            instance = build(kind, *[self.values.for_native(item) for item in args]) if immutable else build(kind)
        if isinstance(starter, types.FunctionType):
            self.call(starter, (instance, *args), kwargs)
        elif starter_owner is not object:
            self.call_native(starter, (instance, *args), kwargs)
        return instance

    def make_class(self, metaclass: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the work of ``type.__call__`` for a metaclass."""
        maker, _ = class_attribute(metaclass, "__new__")
        made = self.call(maker.__func__ if isinstance(maker, staticmethod) else maker, (metaclass, *args), kwargs)
        if isinstance(made, metaclass):
            starter, _ = class_attribute(metaclass, "__init__")
            if isinstance(starter, types.FunctionType):
                self.call(starter, (made, *args), kwargs)
        return made
