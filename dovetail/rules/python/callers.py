"""Modules of the standard library whose functions run natively: they ask who calls them, or write what nobody journals."""

from __future__ import annotations

import abc
import functools
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.shown_frames import call_within, while_handling
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, native_rule, rule


@native_rule("logging", "typing", "enum")
def _call(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """To the function it looks as if the interpreted program calls it."""
    call = call_within(interpreter.frames, lambda frame: {}, functools.partial(function, *args, **kwargs))
    handled = interpreter.handled_exception()
    return call() if handled is None else while_handling(handled, call)


@rule(abc.ABCMeta.register)
def _register(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """From then on ``isinstance`` gives another answer, also where the capture is thrown away."""
    raise Break("a class is registered with an abstract base class", "register it outside of the compiled function")
