"""Calls of functions of torch and of builtins: which of them run natively, and which are done in another way or refused."""

from __future__ import annotations

import math
import re
import types
from collections import deque
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, LockTaken
from dovetail.frontend.interpreter.call_tables import (
    DATA_METHODS,
    IMPURE_BUILTINS,
    IMPURE_TORCH,
    LOCKS,
    PURE_MODULES,
    SEARCHES,
    SYMBOLIC_FUNCTIONS,
    stores_its_arguments,
)
from dovetail.frontend.interpreter.class_lookup import class_attribute
from dovetail.frontend.interpreter.native import is_tensor_method
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import kind_among, layout_rule, method_rule, rule
from dovetail.frontend.values.leaves import LEAF_TYPES, is_extension_record, is_leaf_value, plain_numbers
from dovetail.torch_private import tensors as private_tensors

_UNBOUND_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_IMMUTABLE = (tuple, frozenset, re.Pattern, re.Match)


def _sets_attribute(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is ``object.__setattr__``, called for an object that is no class."""
    if getattr(function, "__name__", "") != "__setattr__":
        return False
    if isinstance(function, types.MethodWrapperType):
        return not isinstance(function.__self__, type)
    return function is object.__setattr__ and not (args and isinstance(args[0], type))


class NativeCalls(TracingInterpreter):
    """The part of the interpreter that calls functions of torch and builtins."""

    def call_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (*args, *kwargs.values())
        kind = kind_among(given)
        if kind is not None:
            found = kind.call(self, function, args, kwargs)
            if found is not NotImplemented:
                return found
        name = getattr(function, "__name__", "")
        module = getattr(function, "__module__", None) or ""
        for handler in method_rule.get(name, ()):
            found = handler(self, function, args, kwargs)
            if found is not NotImplemented:
                return found
        if name in DATA_METHODS:
            raise Break(f".{name} needs the tensor's data", "do this outside of the compiled function")
        if name in IMPURE_TORCH and (module.startswith("torch") or not module):
            raise Break(
                f"torch's {name} changes or reads state outside of the graph", "call it outside of the function"
            )
        for item in given:
            if type(item) is torch.layout and item in layout_rule:
                return layout_rule[item](self, function, args, kwargs)
        return self.native(function, args, kwargs)

    def call_native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs:
            number = self.derive(function, args)
            if number is not NotImplemented:
                return number
        keeps_symbols = (
            function in SYMBOLIC_FUNCTIONS or stores_its_arguments(function) or _sets_attribute(function, args)
        )
        if not keeps_symbols and not is_tensor_method(function, args):
            args = tuple(plain_numbers(item) for item in args)
            kwargs = {key: plain_numbers(item) for key, item in kwargs.items()}
        if isinstance(function, _UNBOUND_METHODS):
            return self._call_unbound(function, args, kwargs)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.Tensor):
            return self.call_torch(function, args, kwargs)
        if isinstance(owner, (list, dict, set)):
            return self.call_container_method(owner, function, args, kwargs)
        if isinstance(owner, types.GeneratorType):
            raise Break("a generator that existed before the call is advanced", "make a list of it first")
        if isinstance(function, types.MethodWrapperType):
            return self._call_slot(owner, function, args, kwargs)
        if owner is None or isinstance(owner, (types.ModuleType, type)) or is_extension_record(owner):
            return self._call_builtin(function, args, kwargs)
        return self._call_bound(owner, function, args, kwargs)

    def _call_unbound(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of a builtin class, found on the class."""
        if args:
            owner, *rest = args
            kind, name = function.__objclass__, function.__name__
            if isinstance(owner, (list, dict, set)) and issubclass(kind, (list, dict, set)):
                return self.call_container_method(owner, function.__get__(owner), tuple(rest), kwargs)
            if isinstance(owner, torch.Tensor) or issubclass(kind, private_tensors.TensorBase):
                return self.call_torch(function, args, kwargs)
            if kind is object:
                found = self._call_slot_of_object(owner, name, rest)
                if found is not NotImplemented:
                    return found
        return self.native(function, args, kwargs)

    def _call_slot(self, owner: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A special method of a builtin class, bound to an object."""
        name = function.__name__
        is_own = name != "__init__" or class_attribute(type(owner), "__init__")[1] is object
        if is_own and not (name == "__setattr__" and isinstance(owner, type)):
            found = self._call_slot_of_object(owner, name, args)
            if found is not NotImplemented:
                return found
        if name == "__get__" and type(owner) is types.FunctionType and args:
            return owner if args[0] is None else types.MethodType(owner, args[0])
        return self.native(function, args, kwargs)

    def _call_slot_of_object(self, owner: Any, name: str, args: Any) -> Any:
        """``object.__setattr__``, ``__getattribute__`` or ``__init__``; NotImplemented for other special methods."""
        if name == "__setattr__":
            self.store_default_attribute(owner, *args)
            return None
        if name == "__getattribute__":
            return self.load_default_attribute(owner, *args)
        return None if name == "__init__" else NotImplemented

    def _call_bound(self, owner: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of an object of a builtin class that is no list, dictionary or set."""
        name = function.__name__
        handler = rule.get(type(owner).__dict__.get(name)) if type(owner) in LEAF_TYPES else None
        if handler is not None:
            return handler(self, (owner, *args), kwargs)
        if isinstance(owner, tuple) and name in SEARCHES and args:
            return self.search(owner, name, args)
        if isinstance(owner, torch.Size) and name == "numel" and not args and not kwargs:
            # torch's own gives a plain number.
            return math.prod(owner)
        if isinstance(owner, (frozenset, deque)):
            args = tuple(self.as_key(item, owner) for item in args)
        if is_leaf_value(owner) or isinstance(owner, _IMMUTABLE) or self.values.source_of(owner) is None:
            return self.native(function, args, kwargs)
        if isinstance(owner, LOCKS) and name in ("__enter__", "acquire"):
            raise LockTaken("a lock is taken at every call", "take it outside of the function")
        raise Break(
            f"{type(owner).__qualname__}.{name} may read or change state that nobody guards",
            "call it outside of the function",
        )

    def _call_builtin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A builtin function or class."""
        reason = IMPURE_BUILTINS.get(function) if isinstance(function, types.BuiltinFunctionType) else None
        if reason is not None:
            raise Break(reason, "do this outside of the compiled function")
        module = getattr(function, "__module__", None)
        if module is not None and (module == "torch" or module.startswith("torch.")):
            return self.call_torch(function, args, kwargs)
        is_pure = module in PURE_MODULES and not is_extension_record(getattr(function, "__self__", None))
        if is_pure or module is None or isinstance(function, type):
            return self.native(function, args, kwargs)
        raise Break(f"{module}.{function.__name__} is not known to be pure", "call it outside of the compiled function")
