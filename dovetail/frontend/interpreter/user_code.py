"""Functions of torch that must be interpreted all the same, because they call code of the user's."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from dovetail.frontend.code.points import is_bound
from dovetail.frontend.interpreter.call_tables import runs_natively
from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.runtime.recipe_builder import interpreted_of

_CALLED_BY_RULE = frozenset({types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial})


def is_user_function(function: types.FunctionType) -> bool:
    """Whether a Python function is interpreted when it is called."""
    return not runs_natively(function.__globals__.get("__name__") or "")


def calls_user_code(value: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a call must be interpreted: of user code, a wrapper of it (``torch.autocast(...)``), the ``apply`` of a class."""
    if type(value) in (types.MethodType, types.BuiltinFunctionType):
        if isinstance(value.__self__, type) and not runs_natively(value.__self__.__module__):
            return True
        value = getattr(value, "__func__", value)
    if type(value) is not types.FunctionType:
        return isinstance(value, torch.nn.Module) or is_user_callable(value)
    if is_user_function(value):
        return True
    if interpreted_of(value) is not value or id(value) in seen:
        return False
    # A decorated function may hold itself in a cell, as that of ``Tensor.__rsub__`` does.
    seen |= {id(value)}
    return any(calls_user_code(cell.cell_contents, seen) for cell in value.__closure__ or () if is_bound(cell))


def is_user_callable(value: Any) -> bool:
    """Whether a value is an object with a ``__call__`` in Python that is interpreted when it is called."""
    kind = type(value)
    if kind in _CALLED_BY_RULE or isinstance(value, type) or kind.__module__.split(".", 1)[0] == "torch":
        return False
    caller, _ = class_attribute(kind, "__call__")
    return isinstance(caller, types.FunctionType) and is_user_function(caller)
