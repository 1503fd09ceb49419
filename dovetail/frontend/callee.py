"""Facts about the function that is called: its code, its lines, the names of its arguments."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from dovetail.errors import UserLocation
from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.frontend.interpreter.user_code import is_user_function


def code_of(function: Any) -> types.CodeType | None:
    """The code that a call of ``function`` runs first; None where that is not Python."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if type(function) is not types.FunctionType:
        name = "forward" if isinstance(function, torch.nn.Module) else "__call__"
        function = class_attribute(type(function), name)[0]
    return function.__code__ if type(function) is types.FunctionType else None


def argument_names(function: Any, count: int) -> list[str]:
    """The names that the user knows the positional arguments of a function or module by.

    >>> argument_names(lambda x, y: x, 3)
    ["L['x']", "L['y']", 'args[2]']
    """
    if isinstance(function, functools.partial):
        # Arguments that were bound before come first; the names of the rest are not worth the search.
        return [f"args[{position}]" for position in range(count)]
    code = code_of(function)
    skip = 0 if type(function) is types.FunctionType else 1
    names = code.co_varnames[skip : code.co_argcount] if code is not None else ()
    return [f"L[{names[position]!r}]" if position < len(names) else f"args[{position}]" for position in range(count)]


def read_when_used(function: Any) -> frozenset[str]:
    """The parameters (see :func:`argument_names`) that are plain local variables: one that is not read needs no guard."""
    function = function.__func__ if type(function) is types.MethodType else function
    if type(function) is not types.FunctionType or not is_user_function(function):
        return frozenset()
    code = function.__code__
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return frozenset(f"L[{name!r}]" for name in names if name not in code.co_cellvars)


def definition_of(function: Any) -> UserLocation | None:
    """The line at which a function, or a module's forward, is defined."""
    code = code_of(function)
    return None if code is None else UserLocation.of(code, code.co_firstlineno)
