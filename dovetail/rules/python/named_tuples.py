"""``collections.namedtuple`` inside of the function: the class is another one at each call, as in eager.

Networks that return the features of several layers often define the class where they make it (LPIPS, VGG for style transfer).
A graph break there would hand a class that was never seen before to the rest of the function, which would be captured at each call.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.runtime.recipe_builder import MADE_BY_CALL

_MAKERS: weakref.WeakKeyDictionary[type, Callable[[], type]] = weakref.WeakKeyDictionary()


@rule(collections.namedtuple)
def _named_tuple(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    given = tuple([_plain(interpreter, item) for item in args])
    named = {name: _plain(interpreter, item) for name, item in kwargs.items()}
    # Python asks the frame that calls.
    named.setdefault("module", interpreter.frames[-1].globals.get("__name__", "__main__"))
    made = interpreter.native(collections.namedtuple, given, named)
    made.__recipe__ = _recipe
    _MAKERS[made] = functools.partial(collections.namedtuple, *given, **named)
    interpreter.created(made)
    return made


def _plain(interpreter: TracingInterpreter, item: Any) -> Any:
    if type(item) is list:
        interpreter.values.whole_deep(item)
        item = tuple(item)
    if not is_leaf_value(item):
        raise Break("a class is defined", "define the class outside of the function")
    return item


def _recipe(value: Any) -> tuple[Any, ...]:
    """An instance outside of the capture is one of the class that was made there."""
    return tuple.__new__, (type(value), tuple(value))


def _class_outside(value: type) -> Any:
    """The class of this call, made anew; None for other classes."""
    maker = _MAKERS.get(value)
    return None if maker is None else (maker, ())


MADE_BY_CALL[type] = _class_outside
