"""Modules of the standard library whose functions run natively and ask who calls them, or which exception is being handled."""

from __future__ import annotations

import functools
from typing import Any

from dovetail.frontend.interpreter.shown_frames import call_within, while_handling
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, native_rule


@native_rule("logging", "typing", "enum")
def _call(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """To the function it looks as if the interpreted program calls it."""
    call = call_within(interpreter.frames, lambda frame: {}, functools.partial(function, *args, **kwargs))
    handled = interpreter.handled_exception()
    return call() if handled is None else while_handling(handled, call)
