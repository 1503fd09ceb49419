"""Entry into torch's autograd engine, for programs in which several threads run backwards.

torch's engine has one hook for all threads. While it is set, the engine hands an autograd graph to a compiler and does not run it.
``Engine::execute`` reads the hook without holding the GIL and calls it later; when another thread clears the hook in between, the
call goes to a null pointer and the process ends. :class:`EngineGate` therefore admits a compiler to the hook only while no other
thread is on its way into the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.torch_private import engine as private_engine

#: How long a capture waits for other threads to get into the engine before its backward is left to eager, in seconds.
PATIENCE = 30.0
#: How often it looks where they are.
_INTERVAL = 0.002


class EngineGate:
    """Lets threads into torch's engine, and a compiler into the engine's hook, never both at once.

    - :meth:`run` enters the engine. It waits while another thread has the hook, or waits for it.
    - :meth:`compiler` puts a compiler into the hook. It waits until each thread that has entered is past the place where the engine
      reads the hook: its :meth:`run` has returned, or the engine has called Python code that is still running. So a hook of one
      thread may wait for the captured backward of another one.
    - :meth:`inside_hook` marks a captured backward that runs while the engine is still in the hook, which admits no second one.
    """

    def __init__(self) -> None:
        #: torch's own function, while sessions are open and :mod:`dovetail.backward_capture.handover` stands in its place.
        self.engine_run: Callable[..., Any] = private_engine.engine_run_backward()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: The thread that has the hook, or waits for it.
        self._holder: int | None = None
        #: By thread: the frame of its innermost :meth:`run`. Its outer ones are past the hook, or it would not have come here.
        self._entering: dict[int, types.FrameType] = {}
        self._hook_is_set = False
        self._runs_in_hook = 0

    def run(self, *call: Any, **options: Any) -> Any:
        """Enter the engine; the arguments are those of ``run_backward``."""
        thread = threading.get_ident()
        with self._lock:
            self._changed.wait_for(lambda: self._holder in (None, thread))
            self._entering[thread] = sys._getframe()
        try:
            return self.engine_run(*call, **options)
        finally:
            with self._lock:
                self._entering.pop(thread, None)
                self._changed.notify_all()

    @contextlib.contextmanager
    def compiler(self, make: Callable[[], Any]) -> Iterator[None]:
        """A block in which the engine hands graphs to ``make()``. Raises :class:`CaptureError` where the hook cannot be had."""
        with self._lock:
            self._changed.wait_for(lambda: self._holder is None)
            self._holder = threading.get_ident()
        try:
            with self._lock:
                self._wait_for_entering_threads()
            if self._runs_in_hook:
                raise CaptureError(
                    "another thread runs hooks of native code in a captured backward, and the engine is taken"
                )
            private_engine.set_engine_compiler(make)
            self._hook_is_set = True
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Clear the hook, if this thread has it."""
        if self._holder != threading.get_ident():
            return
        if self._hook_is_set:
            self._hook_is_set = False
            private_engine.set_engine_compiler(None)
        with self._lock:
            self._holder = None
            self._changed.notify_all()

    @contextlib.contextmanager
    def inside_hook(self) -> Iterator[None]:
        """A block in which the engine has called this thread from its hook; the hook itself is free again."""
        with self._lock:
            self._runs_in_hook += 1
        self.release()
        try:
            yield
        finally:
            with self._lock:
                self._runs_in_hook -= 1

    def _wait_for_entering_threads(self) -> None:
        """Wait until all other threads that have entered the engine are past its look at the hook."""
        own = threading.get_ident()
        give_up = time.monotonic() + PATIENCE
        seen: dict[int, types.FrameType | None] = {}
        while others := {thread: frame for thread, frame in self._entering.items() if thread != own}:
            tops = sys._current_frames()
            callees = {thread: _called_by_engine(frame, tops.get(thread)) for thread, frame in others.items()}
            # Twice the same one: a finalizer, which may run at any moment, has returned by then.
            if all(callee is not None and callee is seen.get(thread) for thread, callee in callees.items()):
                return
            if time.monotonic() > give_up:
                raise CaptureError("another thread's backward keeps torch's engine to itself")
            seen = callees
            self._changed.wait(_INTERVAL)


def _called_by_engine(entry: types.FrameType, top: types.FrameType | None) -> types.FrameType | None:
    """The Python function that the engine has called for the entry with the frame ``entry``; ``top`` is the thread's frame now.

    None where no such call proves that the engine has read the hook. Before that it checks the first gradients, which a tensor
    subclass sees by its ``__torch_dispatch__``, and torch's own module in front of the engine may call functions of its own.
    """
    chain = []
    while top is not None and top is not entry:
        chain.append(top)
        top = top.f_back
    for callee, caller in reversed(list(itertools.pairwise(chain))):
        if caller.f_code is private_engine.ENGINE_CALLER:
            is_early = callee.f_code.co_name == "__torch_dispatch__" or (
                callee.f_code.co_filename == caller.f_code.co_filename
            )
            return None if top is None or is_early else callee
    return None


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
