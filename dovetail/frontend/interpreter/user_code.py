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


def wraps_user_code(function: types.FunctionType, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a decorator of torch's (``torch.autocast(...)``) wraps a function that must be interpreted."""
    if interpreted_of(function) is not function or id(function) in seen:
        return False
    # A decorated function may hold itself in a cell, as that of ``Tensor.__rsub__`` does.
    seen |= {id(function)}
    for cell in function.__closure__ or ():
        inside = cell.cell_contents if is_bound(cell) else None
        inside = inside.__func__ if type(inside) is types.MethodType else inside
        if type(inside) is types.FunctionType:
            if is_user_function(inside) or wraps_user_code(inside, seen):
                return True
        elif isinstance(inside, torch.nn.Module) or is_user_callable(inside):
            return True
    return False


def is_user_callable(value: Any) -> bool:
    """Whether a value is an object with a ``__call__`` in Python that is interpreted when it is called."""
    kind = type(value)
    if kind in _CALLED_BY_RULE or isinstance(value, type) or kind.__module__.split(".", 1)[0] == "torch":
        return False
    caller, _ = class_attribute(kind, "__call__")
    return isinstance(caller, types.FunctionType) and is_user_function(caller)
