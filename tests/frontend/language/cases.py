"""What a program of the language tests is, and how results are compared."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One program. ``breaks`` is a part of the reason why it cannot be one graph; None where it must be one."""

    name: str
    function: Callable[[Any], Any]
    breaks: str | None = None


CASES: list[Case] = []


def case(function: Any = None, *, breaks: str | None = None) -> Any:
    """Register a program."""
    if function is None:
        return lambda inner: case(inner, breaks=breaks)
    CASES.append(Case(function.__name__, function, breaks))
    return function


def source_case(since: tuple[int, int], text: str, breaks: str | None = None) -> None:
    """Register a program in the syntax of a newer Python: the last function that ``text`` defines."""
    if sys.version_info[:2] < since:
        return
    namespace: dict[str, Any] = {"__name__": "tests.frontend.language.newer"}
    # Without the ``from __future__`` of this module: it would turn annotations into texts.
    exec(compile(text, "<string>", "exec", dont_inherit=True), namespace)
    function = [value for value in namespace.values() if isinstance(value, types.FunctionType)][-1]
    case(function, breaks=breaks)


#: What native exceptions hold beside their arguments.
_HELD = (
    "value",
    "code",
    "errno",
    "strerror",
    "filename",
    "filename2",
    "encoding",
    "start",
    "reason",
    "lineno",
    "text",
    "path",
)


def plain(value: Any) -> Any:
    """A result as something that can be compared: exceptions by type, text and chain; objects by class name and attributes."""
    if isinstance(value, BaseExceptionGroup):
        return (type(value).__name__, value.message, [plain(item) for item in value.exceptions])
    if isinstance(value, BaseException):
        chain = (plain(value.__cause__), plain(value.__context__), value.__suppress_context__)
        held = [(name, plain(getattr(value, name))) for name in _HELD if hasattr(value, name)]
        return (type(value).__name__, [plain(item) for item in value.args], chain, held)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, sorted(value, key=repr)]
    if (
        hasattr(value, "__dict__")
        and type(value).__module__.startswith("tests.frontend.language")
        and not isinstance(value, enum.Enum)
    ):
        return (type(value).__name__, plain(vars(value)))
    return value
