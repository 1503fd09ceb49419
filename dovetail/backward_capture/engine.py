"""Entry into torch's autograd engine, for programs in which several threads run backwards.

torch's engine has one hook for all threads. While it is set, the engine hands an autograd graph to a compiler and does not run it.
``Engine::execute`` reads the hook without holding the GIL and calls it later; when another thread clears the hook in between, the
call goes to a null pointer and the process ends. :class:`EngineGate` therefore admits a compiler to the hook only while no other
thread is on its way into the engine.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.torch_private import engine as private_engine

#: How long a capture waits for other threads to leave the engine before its backward is left to eager, in seconds.
PATIENCE = 30.0


class EngineGate:
    """Lets threads into torch's engine, and a compiler into the engine's hook, never both at once.

    - :meth:`run` enters the engine. It waits while another thread has the hook, or waits for it.
    - :meth:`compiler` puts a compiler into the hook. It waits until no other thread may still be in front of the place where the
      engine reads the hook: its :meth:`run` has returned, or it has called :meth:`is_past_the_hook`, as captured backwards do. So
      a hook in a captured backward may wait for the captured backward of another thread.
    """

    def __init__(self) -> None:
        #: torch's own function, while sessions are open and :mod:`dovetail.backward_capture.handover` stands in its place.
        self.engine_run: Callable[..., Any] = private_engine.EngineFunctions.present().run_backward
        self._changed = threading.Condition()
        #: The thread that has the hook, or waits for it.
        self._holder: int | None = None
        #: The threads that have entered the engine and may not have read the hook yet.
        self._entering: set[int] = set()

    def run(self, *call: Any, **options: Any) -> Any:
        """Enter the engine; the arguments are those of ``run_backward``."""
        thread = threading.get_ident()
        # An outer call of this thread is, or it would not have come here.
        self.is_past_the_hook()
        with self._changed:
            self._changed.wait_for(lambda: self._holder in (None, thread))
            self._entering.add(thread)
        try:
            return self.engine_run(*call, **options)
        finally:
            self.is_past_the_hook()

    def is_past_the_hook(self) -> None:
        """Note that the engine has read the hook for this thread."""
        with self._changed:
            self._entering.discard(threading.get_ident())
            self._changed.notify_all()

    @contextlib.contextmanager
    def compiler(self, make: Callable[[], Any]) -> Iterator[None]:
        """A block in which the engine hands graphs to ``make()``. Raises :class:`CaptureError` where the hook cannot be had."""
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._holder is None)
            self._holder = thread
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._entering <= {thread}, PATIENCE):
                    raise CaptureError("another thread's backward keeps torch's engine to itself")
            private_engine.set_engine_compiler(make)
            try:
                yield
            finally:
                private_engine.set_engine_compiler(None)
        finally:
            with self._changed:
                self._holder = None
                self._changed.notify_all()


#: The gate of the only engine that there is.
gate = EngineGate()


class _InTheEngine(torch.autograd.Function):
    """An autograd node whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        ctx.function()
        return None, None


def call_in_backward(keep_graph: Any, function: Callable[[], Any]) -> Any:
    """Return ``function()``, called within a backward: hooks may queue callbacks and ask which backward they are in."""
    result: list[Any] = []
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        root = _InTheEngine.apply(anchor, lambda: result.append(function()))  # type: ignore[no-untyped-call]
    gate.run((root,), (torch.ones(()),), keep_graph, False, (), True, accumulate_grad=True)
    return result[0]
