"""A fallback for a backend that may fail: ATen's operators run where it raises, crashes, hangs or violates the protocol."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.backends.aten import compile_aten
from dovetail.backends.debug import processes
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, compile_with
from dovetail.backends.registry import lookup_backend
from dovetail.errors import EagerFallbackWarning
from dovetail.torch_private import sizes as private_sizes


class _Guard:
    """Compiles with one backend until it has failed once, and with ATen's operators from then on."""

    def __init__(self, inner: Backend, seconds: float) -> None:
        self.inner = inner
        self.seconds = seconds
        self.given_up = False

    def compile(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
    ) -> CompiledCallable:
        """Compile with the backend if a trial in a fork succeeds."""

        def compiled() -> CompiledCallable:
            return compile_with(self.inner, graph, example_inputs, kind, options)

        if not self.given_up:
            zeros = _zeros_like(example_inputs) if processes.can_fork() else None
            problem = "" if zeros is None else self._tried(lambda: compiled()(zeros))
            try:
                if not problem:
                    return compiled()
            except Exception as error:  # noqa: BLE001  (a backend may raise anything)
                problem = _words(error)
            self._give_up(problem)
        return compile_aten(graph, example_inputs, kind=kind)

    def _tried(self, attempt: Callable[[], object]) -> str:
        """The problem of an attempt in a fork of this process, in words; empty if there is none."""

        def work(write: processes.Write) -> None:
            try:
                attempt()
                write({"problem": ""})
            except Exception as error:  # noqa: BLE001  (a backend may raise anything)
                write({"problem": _words(error)})

        for row in processes.rows_of_fork(work, self.seconds):
            return f"it {row}" if isinstance(row, processes.Lost) else str(row["problem"])
        return "it ended the process without a word"

    def _give_up(self, problem: str) -> None:
        if self.given_up:
            return
        self.given_up = True
        warnings.warn(
            f"backend {self.inner.name!r} is not used any more, ATen's operators run instead: {problem}"
            f"\n  what to do: run `dovetail check-backend {self.inner.name}`, or choose another backend",
            EagerFallbackWarning,
            stacklevel=2,
        )


def guarded(backend: str | Backend | Callable[..., Any] | None = None, *, seconds: float = 120.0) -> Backend:
    """Return the backend with a fallback to ATen's operators, as a ``backend`` for :func:`dovetail.compile`.

    Each graph is compiled and run once in a fork of this process first, on zeros, which may take ``seconds``; so compiling takes
    twice as long. The first failure gives one :class:`EagerFallbackWarning`, and ATen's operators run from then on. None is the
    default backend. A process that uses CUDA cannot be forked: only what the backend raises is caught there.
    """
    inner = lookup_backend(backend)
    if inner.takes_program:
        return inner
    return _guarded(inner, seconds)


def _guarded(inner: Backend, seconds: float) -> Backend:
    for_options = inner.for_options
    return dataclasses.replace(
        inner,
        compile=_Guard(inner, seconds).compile,
        for_options=for_options and (lambda options: _guarded(for_options(options), seconds)),
    )


def _words(error: BaseException) -> str:
    """An error in one sentence, without advice."""
    return f"{type(error).__name__}: {error}".split("\n  what to do")[0]


def _zeros_like(examples: Sequence[Any]) -> list[Any] | None:
    """Values like fake ones, at the sizes of the capture; None where only data decides a size.

    Zeros are valid indices, and no arithmetic on them overflows.
    """
    found = []
    for value in examples:
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        numbers = [item.node.hint if private_sizes.is_symbolic(item) else item for item in sizes]
        if not all(type(item) in (int, float, bool) for item in numbers):
            return None
        if isinstance(value, torch.Tensor):
            layout = numbers[: value.dim()], numbers[value.dim() :]
            numbers = [torch.empty_strided(*layout, dtype=value.dtype, device=value.device).zero_()]
        found += numbers
    return found
