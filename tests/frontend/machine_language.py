"""The programs of language.py by the frame machine, against Python itself: needs an interpreter, but no torch.

``python -m tests.frontend.machine_language`` prints the names of the programs that differ and exits with their number.
"""

from __future__ import annotations

import inspect
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from dovetail.frontend.code.bind import bind
from dovetail.frontend.code.frame import Break, Frame, decode
from dovetail.frontend.instructions import Return, handlers_of
from dovetail.frontend.interpreter.machine import Machine
from dovetail.rules.python import match_statements, python315  # noqa: F401  (their instructions)
from tests.frontend.language import CASES, plain

ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _default(function: types.FunctionType, name: str, position: int | None) -> Any:
    if position is None:
        return (function.__kwdefaults__ or {})[name]
    return (function.__defaults__ or ())[position]


def _is_interpreted(code: types.CodeType) -> bool:
    try:
        handlers_of(code, decode(code))
    except Break:
        return False
    return True


class DeepMachine(Machine):
    """A machine that runs the functions of the programs instruction by instruction too, where their code can be interpreted."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False) -> Any:
        """``function(*args, **kwargs)``."""
        if isinstance(function, types.MethodType):
            return self.call(function.__func__, (function.__self__, *args), kwargs)
        if isinstance(function, types.FunctionType) and (function.__module__ or "").startswith(
            "tests.frontend.language"
        ):
            if not function.__code__.co_flags & ASYNC and _is_interpreted(function.__code__):
                result = self.run_frame(Frame(function, bind(function, args, kwargs, _default)), None)
                assert isinstance(result, Return)
                return result.value
        return super().call(function, args, kwargs)


def run_by_machine(function: Callable[[Any], Any], *args: Any) -> Any:
    """Run a function instruction by instruction."""
    return DeepMachine().call(function, args, {})


def main() -> int:
    """Run all programs both ways."""
    wrong = 0
    for case in CASES:
        expected = plain(case.function(1.5))
        try:
            found = plain(run_by_machine(case.function, 1.5))
        except Exception:
            found = traceback.format_exc(limit=-3)
        if found != expected:
            wrong += 1
            print(f"{case.name}: {found!r} instead of {expected!r}")
    print(f"Python {sys.version_info[0]}.{sys.version_info[1]}: {len(CASES)} programs, {wrong} differ")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 100))
