"""Objects with a ``__del__``: Python calls it as soon as nobody refers to the object, and a trace refers to all that it meets."""

from __future__ import annotations

import types

from dovetail.frontend.code.frame import Break, LetGo
from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import class_rule, end_rule


def has_finalizer(kind: type) -> bool:
    """Whether a class has a ``__del__`` in Python that is not Dovetail's own.

    >>> class Logged:
    ...     def __del__(self): print("gone")
    >>> has_finalizer(Logged), has_finalizer(list)
    (True, False)
    """
    found, owner = class_attribute(kind, "__del__")
    return isinstance(found, types.FunctionType) and not (owner.__module__ or "").startswith("dovetail.")


@class_rule
def _made(kind: type) -> None:
    """An object of this class cannot be made in a trace; no later graph could make it either."""
    if has_finalizer(kind):
        raise Break(
            f"a {kind.__qualname__} object is made, which has a __del__: when it runs is for Python to say",
            "make the object outside of the function",
            resumable=False,
        )


@end_rule
def _let_go(interpreter: TracingInterpreter) -> None:
    """The function has replaced or deleted an object that has a ``__del__``."""
    for value in interpreter.effects.let_go():
        if has_finalizer(type(value)):
            raise LetGo(
                f"a {type(value).__qualname__} object is let go, which has a __del__: when it runs is for Python to say",
                "let go of the object outside of the function",
                resumable=False,
            )
