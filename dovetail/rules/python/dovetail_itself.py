"""Dovetail's own functions, called inside of a compiled function, and what they have made, which becomes part of the same graph."""

from __future__ import annotations

from typing import Any

from dovetail.face.compile import capture, compile
from dovetail.face.dispatcher import Dispatcher
from dovetail.face.module import CompiledModule, is_own, of_original
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, rule
from dovetail.rules.refusals import refuse

refuse(
    (compile, capture),
    "dovetail.{name} is called inside of a compiled function",
    "call it outside: what a compiled function calls is compiled along with it",
)


@rule(CompiledModule.__getattribute__)
def _attribute_of_module(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    wrapper, name = args
    if is_own(name):
        return interpreter.load_default_attribute(wrapper, name)
    original = interpreter.load_default_attribute(wrapper, "original")
    return of_original(wrapper, name, interpreter.load_attribute(original, name))


@rule(CompiledModule.__call__)
def _call_module(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    compiled = interpreter.load_default_attribute(args[0], "compiled_call")
    if not isinstance(compiled, Dispatcher):
        raise Break(
            f"a module with a {type(compiled).__name__} of its own is called inside of a compiled function",
            "compile the whole step in the way in which the module was compiled",
        )
    return Instead(compiled, args[1:], kwargs)


def call_original(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """The options of the function that is captured hold for all of it."""
    compiled, *rest = args
    if interpreter.load_attribute(interpreter.load_attribute(compiled, "options"), "passes"):
        raise Break(
            "a compiled function with passes of its own is called inside of a compiled function",
            "give the passes to the outer one",
        )
    return Instead(interpreter.load_attribute(compiled, "original"), tuple(rest), kwargs)


rule(Dispatcher.__call__)(call_original)
