"""Bind call arguments to a function's parameters as CPython does, with the same errors."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def bind(
    function: types.FunctionType,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    default_of: Callable[[types.FunctionType, str, int | None], Any],
) -> dict[str, Any]:
    """Local variables at entry. ``default_of(function, name, position)`` reads a default (position None: keyword-only).

    Raises the ``TypeError`` that CPython raises for a call that does not fit.
    """
    code = function.__code__
    positional = code.co_argcount
    names = code.co_varnames
    named = positional + code.co_kwonlyargcount
    local_values: dict[str, Any] = dict(zip(names[:positional], args, strict=False))
    rest: dict[str, Any] = {}
    acceptable = names[code.co_posonlyargcount : named]
    for key, value in kwargs.items():
        if key in acceptable:
            if key in local_values:
                _raise_as_python_does(function, args, kwargs)
            local_values[key] = value
        else:
            rest[key] = value
    has_var_args = bool(code.co_flags & inspect.CO_VARARGS)
    has_var_kwargs = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    if (len(args) > positional and not has_var_args) or (rest and not has_var_kwargs):
        _raise_as_python_does(function, args, kwargs)
    defaults = function.__defaults__ or ()
    first_default = positional - len(defaults)
    for position in range(positional):
        name = names[position]
        if name not in local_values:
            if position < first_default:
                _raise_as_python_does(function, args, kwargs)
            local_values[name] = default_of(function, name, position - first_default)
    keyword_defaults = function.__kwdefaults__ or {}
    for name in names[positional:named]:
        if name not in local_values:
            if name not in keyword_defaults:
                _raise_as_python_does(function, args, kwargs)
            local_values[name] = default_of(function, name, None)
    position = named
    if has_var_args:
        local_values[names[position]] = tuple(args[positional:])
        position += 1
    if has_var_kwargs:
        local_values[names[position]] = rest
    return local_values


def _raise_as_python_does(function: types.FunctionType, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise CPython's own TypeError, by calling a function with the same parameters and no body."""
    code, nothing = function.__code__, (lambda: None).__code__
    kept = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    empty = code.replace(
        co_code=nothing.co_code,
        co_consts=nothing.co_consts,
        co_names=(),
        co_freevars=(),
        co_cellvars=(),
        co_exceptiontable=b"",
        co_stacksize=nothing.co_stacksize,
        co_flags=(code.co_flags & kept) | nothing.co_flags,
    )
    same = types.FunctionType(empty, {}, function.__name__, function.__defaults__)
    same.__kwdefaults__ = function.__kwdefaults__
    same.__qualname__ = function.__qualname__
    same(*args, **kwargs)
    raise TypeError(f"{function.__qualname__}() does not accept these arguments")
