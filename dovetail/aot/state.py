"""Stage 0: what is to be captured, on which inputs, by which frontend. Contexts go on the caller's ``ExitStack``."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.aot.capture_result import CaptureResult
from dovetail.errors import NotCallableError, StageError
from dovetail.trace import CaptureSettings, Trace, overrides

Frontend = Callable[[Trace, Any, tuple[Any, ...], Mapping[str, Any]], CaptureResult]


@dataclass(frozen=True)
class AOTState:
    """Stage 0's result: a function, its arguments and the open trace that stage 1 will fill."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    trace: Trace
    frontend: Frontend
    _open: list[bool]

    @property
    def is_open(self) -> bool:
        """Whether the caller's ``ExitStack`` still holds the trace open."""
        return self._open[0]


def create_state(
    stack: contextlib.ExitStack,
    function: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    frontend: Frontend | str = "bytecode",
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    settings: CaptureSettings | None = None,
    fake_mode: Any = None,
) -> AOTState:
    """Open a trace on ``stack`` for one call ``function(*args, **kwargs)``; ``settings`` say how it captures.

    With ``fake_mode`` the trace lives in the caller's fake mode and shape environment, see :class:`dovetail.trace.Trace`.

    Raises :class:`NotCallableError` for something that cannot be called, :class:`StageError` for an unknown frontend.
    """
    if not callable(function):
        raise NotCallableError(
            f"an object of type {type(function).__name__} cannot be captured because it cannot be called",
            advice="hand over a function or a torch.nn.Module",
        )
    if isinstance(frontend, str):
        if frontend != "bytecode":
            raise StageError(f"there is no frontend {frontend!r}", advice='the frontend by name is "bytecode"')
        # It lives in a room above.
        loaded: Frontend = importlib.import_module("dovetail.face.loading").bytecode_frontend()
        frontend = loaded
    is_open = [True]
    stack.callback(is_open.__setitem__, 0, False)
    trace = Trace(settings, decompositions, fake_mode).open(stack)
    trace.shape_env.may_assume = bool(overrides.DATA_SIZES)
    return AOTState(function, tuple(args), dict(kwargs or {}), trace, frontend, is_open)
