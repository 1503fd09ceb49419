"""The tables in which rules put what they know of single functions, methods and kinds of object.

The interpreter looks here before it does anything by its own lights. The tables are empty until :func:`load_rules
<dovetail.face.loading.load_rules>` has imported the packages of rules; with empty tables a plain model is captured all the same.

>>> import math
>>> @rule(math.hypot)
... def _hypot(interpreter, args, kwargs):
...     return interpreter.call_native(math.sqrt, (sum(item * item for item in args),), {})
>>> CALLS.pop(math.hypot) is _hypot
True
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from dovetail.frontend.protocol import TracingInterpreter

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
_Rule = TypeVar("_Rule", bound=Callable[..., Any])


class CallRule(Protocol):
    """What a call of one certain function does."""

    def __call__(self, interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords, /) -> Any:
        """The result of the call.

        The rule decides for all arguments. What it does not know it hands to ``interpreter.call_torch`` or
        ``interpreter.call_native``, which do not ask it again. It reads objects that existed before the capture by the interpreter
        (``load_attribute``, ``drain`` …), which guards what was read.
        """


class MethodRule(Protocol):
    """What a call of one of several functions does."""

    def __call__(self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords, /) -> Any:
        """The result of the call; NotImplemented where the function's own meaning is enough."""


#: Rules for a function, class or builtin, by itself.
CALLS: dict[Any, CallRule] = {}
#: Rules for functions and methods of torch, by name; asked in turn.
METHODS: dict[str, list[MethodRule]] = {}
#: Rules for functions that a library makes anew each time, by their code.
CODES: dict[int, MethodRule] = {}


def rule(*functions: Any) -> Callable[[_Rule], _Rule]:
    """Register a :class:`CallRule` for these functions."""

    def register(handler: _Rule) -> _Rule:
        for function in functions:
            CALLS[function] = handler
        return handler

    return register


def method_rule(*names: str) -> Callable[[_Rule], _Rule]:
    """Register a :class:`MethodRule` for the functions of torch that have one of these names."""

    def register(handler: _Rule) -> _Rule:
        for name in names:
            METHODS.setdefault(name, []).append(handler)
        return handler

    return register


def code_rule(code: types.CodeType) -> Callable[[_Rule], _Rule]:
    """Register a :class:`MethodRule` for the functions that have this code."""

    def register(handler: _Rule) -> _Rule:
        CODES[id(code)] = handler
        return handler

    return register
