"""Bind call arguments to a function's parameters: Python itself does it, for a function that has the same parameters."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_DEFAULT = object()


def bind(
    function: types.FunctionType,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    default_of: Callable[[types.FunctionType, str, int | None], Any],
) -> dict[str, Any]:
    """Local variables at entry. ``default_of(function, name, position)`` reads a default (position None: keyword-only).

    Raises the ``TypeError`` that Python raises for a call that does not fit.

    >>> bind(lambda a, *rest, b=1: None, (1, 2), {}, lambda function, name, position: function.__kwdefaults__[name])
    {'a': 1, 'b': 1, 'rest': (2,)}
    """
    code, given = function.__code__, frozenset(function.__kwdefaults__ or ())
    count = len(function.__defaults__ or ())
    bound: dict[str, Any] = _binder(code, count, given, function.__qualname__)(*args, **kwargs)
    first = code.co_argcount - count
    for position in range(count):
        name = code.co_varnames[first + position]
        if bound[name] is _DEFAULT:
            bound[name] = default_of(function, name, position)
    for name in given:
        if bound.get(name) is _DEFAULT:
            bound[name] = default_of(function, name, None)
    return bound


@functools.lru_cache(maxsize=4096)
def _binder(code: types.CodeType, count: int, given: frozenset[str], qualname: str) -> Callable[..., dict[str, Any]]:
    """A function with the parameters of ``code`` that returns its arguments by name; the last ``count`` positional ones and the
    ``given`` ones by keyword have a default.
    """
    named = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[
        : named + bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    ]
    # The iterator that a comprehension is called with has a name that is none: ".0".
    written = [name.replace(".", "_") for name in names]
    parameters = [
        f"{name}=default" if at >= code.co_argcount - count else name
        for at, name in enumerate(written[: code.co_argcount])
    ]
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    rest = iter(written[named:])
    if code.co_flags & inspect.CO_VARARGS:
        parameters.append(f"*{next(rest)}")
    elif code.co_kwonlyargcount:
        parameters.append("*")
    parameters += [f"{name}=default" if name in given else name for name in written[code.co_argcount : named]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parameters.append(f"**{next(rest)}")
    items = ", ".join(f"{name!r}: {inside}" for name, inside in zip(names, written, strict=True))
    binder: Any = eval(f"lambda {', '.join(parameters)}: {{{items}}}", {"default": _DEFAULT})
    binder.__qualname__ = binder.__name__ = qualname
    return binder  # type: ignore[no-any-return]
