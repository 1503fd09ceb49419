"""Functions of torch that must be interpreted all the same, because they call code of the user's."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from dovetail.frontend.interpreter.call_tables import NATIVE_CALLABLES, runs_natively
from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.runtime.recipe_builder import interpreted_of

_CALLED_BY_RULE = frozenset({types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial})
_NO_CLASSES_OF_USERS = frozenset({int, float, bool, str, bytes, tuple, list, dict, set, type(None)})


def is_user_function(function: types.FunctionType) -> bool:
    """Whether a Python function is interpreted when it is called."""
    return not runs_natively(function.__globals__.get("__name__") or "")


def wraps_user_code(function: types.FunctionType, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a decorator of torch's (``torch.autocast(...)``) wraps a function that must be interpreted."""
    if interpreted_of(function) is not function or id(function) in seen:
        return False
    # A decorated function may hold itself in a cell, as that of ``Tensor.__rsub__`` does.
    seen |= {id(function)}
    for cell in function.__closure__ or ():
        try:
            inside = cell.cell_contents
        except ValueError:
            continue
        inside = inside.__func__ if type(inside) is types.MethodType else inside
        if type(inside) is types.FunctionType:
            if is_user_function(inside) or wraps_user_code(inside, seen):
                return True
        elif isinstance(inside, torch.nn.Module) or is_user_callable(inside):
            return True
    return False


def is_overridable(function: types.FunctionType) -> bool:
    """Whether a Python function of torch's hands its call to tensor subclasses and modes first, and is plain torch calls below.

    Interpreted, its parts are on the program tape; as one call it is not if it calls user code, which no replay may run.
    Methods of tensors do not count: they keep what they are given (hooks) for later.
    """
    is_method = getattr(torch.Tensor, function.__name__, None) is function
    return "handle_torch_function" in function.__code__.co_names and not is_method


def is_method_of_users_class(function: types.FunctionType, args: tuple[Any, ...]) -> bool:
    """Whether a method of a class of torch's, or a descriptor of torch's, is called for an object of a class that others have
    derived from torch's.

    What it calls in turn may be theirs (``torch.distributions.Transform.__call__`` calls ``_call``). Tensors and modules have
    ways of their own.
    """
    owner = args[1] if function.__name__ == "__get__" and len(args) > 1 else args[0] if args else None
    kind = type(owner)
    if kind in _NO_CLASSES_OF_USERS or kind.__module__.split(".", 1)[0] == "torch":
        return False
    if isinstance(owner, (torch.Tensor, type, *NATIVE_CALLABLES, types.FunctionType)):
        return False
    name, where = function.__qualname__, function.__module__ or ""
    if where.split(".", 1)[0] != "torch":
        # The standard library's own classes run natively.
        return False
    is_getter = function.__name__ == "__get__"
    return any(
        (base.__module__ == where and name.startswith(f"{base.__qualname__}."))
        or (is_getter and base.__module__.startswith("torch."))
        for base in kind.__mro__
        if not issubclass(base, torch.nn.Module)
    )


def calls_user_code(value: Any) -> bool:
    """Whether an argument is user code that the function which is given it will call."""
    value = value.__func__ if type(value) is types.MethodType else value
    if type(value) is types.FunctionType:
        return is_user_function(value)
    return type(value) is functools.partial or isinstance(value, torch.nn.Module) or is_user_callable(value)


def is_user_callable(value: Any) -> bool:
    """Whether a value is an object with a ``__call__`` in Python that is interpreted when it is called."""
    kind = type(value)
    if kind in _CALLED_BY_RULE or isinstance(value, type) or kind.__module__.split(".", 1)[0] == "torch":
        return False
    caller, _ = class_attribute(kind, "__call__")
    return isinstance(caller, types.FunctionType) and is_user_function(caller)
