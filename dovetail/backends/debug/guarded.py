"""A fallback for a backend that may fail: ATen's operators run where it raises, crashes, hangs or violates the protocol.

>>> import torch, dovetail
>>> from dovetail.backends import guarded
>>> def broken(graph, example_inputs, *, kind, options):
...     raise NotImplementedError("not today")
>>> import warnings
>>> with warnings.catch_warnings(record=True) as caught:
...     warnings.simplefilter("always")
...     dovetail.compile(torch.sin, backend=guarded(broken))(torch.zeros(2))
tensor([0., 0.])
>>> len(caught)
1
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.backends.aten import compile_aten
from dovetail.backends.debug.trial import try_apart, words
from dovetail.backends.debug.values import used_gpus
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, compile_with
from dovetail.backends.registry import lookup_backend
from dovetail.errors import EagerFallbackWarning
from dovetail.torch_private import state as private_state


class _Guard:
    """Compiles with one backend until it has failed once, and with ATen's operators from then on."""

    def __init__(self, inner: Backend, seconds: float) -> None:
        self.inner = inner
        self.seconds = seconds
        self.given_up = False

    def compile(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
    ) -> CompiledCallable:
        """Compile with the backend if a trial in another process succeeds."""
        plain = compile_aten(graph, example_inputs, kind=kind)
        if self.given_up:
            return plain
        problem = try_apart(self.inner, graph, example_inputs, kind, options, seconds=self.seconds)
        if problem:
            self._give_up(problem)
            return plain
        try:
            compiled = compile_with(self.inner, graph, example_inputs, kind, options)
        except Exception as error:  # noqa: BLE001  (a backend may raise anything)
            self._give_up(words(error))
            return plain
        return self._until_it_fails(compiled, plain)

    def _until_it_fails(self, compiled: CompiledCallable, plain: CompiledCallable) -> CompiledCallable:
        chosen: CompiledCallable | None = None

        def run(inputs: list[Any]) -> list[Any]:
            nonlocal chosen
            if chosen is not None:
                return chosen(inputs)
            kept, gpus = list(inputs), used_gpus()
            state = private_state.random_states(gpus)
            try:
                outputs = compiled(inputs)
            except Exception as error:  # noqa: BLE001  (a backend may raise anything)
                chosen = plain
                self._give_up(words(error))
                private_state.set_random_states(state, gpus)
                return plain(kept)
            chosen = compiled
            return outputs

        return run

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

    Each graph is compiled and run once in a fork of this process first, which may take ``seconds``; so compiling takes twice
    as long. The first failure gives one :class:`EagerFallbackWarning`, and ATen's operators run from then on. None is the
    default backend. A process that uses CUDA cannot be forked: a new interpreter tries the graph, which takes some seconds
    more; for a backend that only this process knows, or symbolic sizes, only exceptions and outputs that do not fit are caught.
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
