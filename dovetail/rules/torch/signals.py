"""Signals that arrive during a capture: their handlers run between two operators, or when the capture is over.

Python runs a handler between any two instructions of the main thread. An exception that it raises (``KeyboardInterrupt``, the
``TimeoutError`` of an alarm) may come where a mode of torch is entered, of which nobody has taken note yet. Torch ends the
process when it finds such a mode while it leaves an operator.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.errors import Interruption
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace.overrides import EVERY, WHILE_OPEN
from dovetail.trace.trace import open_trace

_handlers: dict[int, Callable[[int, Any], Any]] = {}
"""The program's handlers while a capture of the main thread is open."""
_waiting: list[int] = []
"""The signals that have arrived since."""
_NAMES = (
    *("INT", "TERM", "ALRM", "HUP", "QUIT", "USR1", "USR2", "VTALRM", "PROF", "CHLD", "WINCH", "CONT", "TSTP", "XCPU"),
    "BREAK",
)
_SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}"))


class _Raised(Interruption):
    """A handler has raised ``error``: the capture ends, and no handler of the program sees it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def _hold(number: int, frame: Any) -> None:
    waits = number in _waiting
    _waiting.append(number)
    if waits:
        # Whoever sends it again does not want to wait.
        _deliver_inside()


def _deliver() -> None:
    while _waiting:
        number = _waiting.pop(0)
        _handlers[number](number, sys._getframe())


def _deliver_inside() -> None:
    try:
        with private_tracing.disable_current_modes():
            _deliver()
    except BaseException as error:  # noqa: BLE001  (whatever it is, the call is over)
        raise _Raised(error) from None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _between_operators(run: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the handlers outside of the modes of the capture."""
    if _waiting and _is_main_thread():
        _deliver_inside()
    return NotImplemented


def _give_back() -> None:
    for number, handler in _handlers.items():
        # The program may have set another one meanwhile.
        if signal.getsignal(number) is _hold:
            signal.signal(number, handler)


class _SignalsWait:
    """A block that is left by what a handler has raised."""

    def __init__(self) -> None:
        self._is_outermost = not _handlers and _is_main_thread()

    def __enter__(self) -> None:
        if not self._is_outermost:
            return
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    _handlers[number] = handler
                    signal.signal(number, _hold)
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if not self._is_outermost:
            return
        trace = open_trace()
        try:
            _give_back()
            if isinstance(error, _Raised):
                raise error.error
            _deliver()
        except BaseException as raised:
            if trace is not None:
                trace.findings.interrupt = raised
            # Not the capture's, which the program knows nothing of.
            raised.__context__ = None
            raise
        finally:
            self._end()

    def _end(self) -> None:
        _give_back()
        _handlers.clear()
        _waiting.clear()


EVERY.append(_between_operators)
WHILE_OPEN.append(_SignalsWait)
