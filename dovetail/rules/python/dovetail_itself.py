"""Dovetail's own functions, called inside of a compiled function."""

from __future__ import annotations

from typing import Any

from dovetail.face.compile import capture, compile
from dovetail.face.explanation import explain
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule


def _refuse(function: Any) -> None:
    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        raise Break(
            f"dovetail.{function.__name__} is called inside of a compiled function",
            "call it outside: what a compiled function calls is compiled along with it",
        )


for _function in (compile, capture, explain):
    _refuse(_function)
