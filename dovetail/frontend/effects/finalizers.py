"""Objects with a ``__del__``: Python calls it as soon as nobody refers to the object, and a trace refers to all that it meets."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from dovetail.frontend.code.frame import Break, LetGo
from dovetail.frontend.interpreter.lookup import class_attribute


def has_finalizer(kind: type) -> bool:
    """Whether a class has a ``__del__`` in Python that is not Dovetail's own.

    >>> class Logged:
    ...     def __del__(self): print("gone")
    >>> has_finalizer(Logged), has_finalizer(list)
    (True, False)
    """
    found, owner = class_attribute(kind, "__del__")
    return isinstance(found, types.FunctionType) and not (owner.__module__ or "").startswith("dovetail.")


def check_made(kind: type) -> None:
    """Raise :class:`Break` where an object of this class cannot be made in a trace; no later graph could either."""
    if has_finalizer(kind):
        raise Break(
            f"a {kind.__qualname__} object is made, which has a __del__: when it runs is for Python to say",
            "make the object outside of the function",
            resumable=False,
        )


def check_let_go(values: Iterable[Any]) -> None:
    """Raise :class:`LetGo` where one of the objects that the function has replaced or deleted has a ``__del__``."""
    for value in values:
        if has_finalizer(type(value)):
            raise LetGo(
                f"a {type(value).__qualname__} object is let go, which has a __del__: when it runs is for Python to say",
                "let go of the object outside of the function",
                resumable=False,
            )
