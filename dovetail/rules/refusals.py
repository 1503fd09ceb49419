"""Functions that no graph can hold: it breaks where one is called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule


def refuse(
    functions: Iterable[Any],
    reason: str,
    advice: str = "call it outside of the compiled function",
    is_clean: bool = False,
) -> None:
    """Break the graph at calls of these functions; ``{name}`` in the reason is that of the function."""
    for function in functions:
        _refuse(function, reason.format(name=function.__name__), advice, is_clean)


def _refuse(function: Any, reason: str, advice: str, is_clean: bool) -> None:
    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        raise Break(reason, advice, is_clean=is_clean)
