"""Helpers for the tests of the ``cudagraphs`` backend: programs run eagerly and recorded, and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import dovetail
from dovetail.backends import CUDAGRAPHS
from dovetail.backends.cudagraphs import SimulatedRecorder, compile_cudagraphs
from dovetail.backends.protocol import Backend
from tests import differential


def compile_recorded(function: Callable[..., Any], recorder: SimulatedRecorder, **options: Any) -> Any:
    """``dovetail.compile`` with CUDA graphs that are recorded by ``recorder``."""
    settings = {"kernels": "aten", "recorder": recorder, **options}
    return dovetail.compile(function, backend="cudagraphs", backend_options=settings, fullgraph=True)


def recorded_backend(recorder: SimulatedRecorder, **options: Any) -> Backend:
    """The backend with the options built in, for those who compile graphs directly."""
    settings = {"kernels": "aten", "recorder": recorder, **options}

    def compile_graph(graph: Any, inputs: Any, *, kind: Any, options: Any) -> Any:
        return compile_cudagraphs(graph, inputs, kind=kind, options={**settings, **options})

    described = CUDAGRAPHS.with_options(settings)
    return replace(described, compile=compile_graph, for_options=None)


def check_calls(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    recorder: SimulatedRecorder | None = None,
    *,
    exact: bool = True,
    replays: bool = True,
    **options: Any,
) -> SimulatedRecorder:
    """Run all calls eagerly and recorded; results, gradients, arguments and random state must agree after each."""
    recorder = recorder or SimulatedRecorder()
    differential.check_calls(
        function, calls, compiler=lambda one: compile_recorded(one, recorder, **options), exact=exact, keep=True
    )
    if replays:
        assert recorder.replays > 0, "nothing was replayed"
    return recorder


def check_training(
    module: torch.nn.Module,
    inputs: Sequence[tuple[Any, ...]],
    loss: Callable[..., torch.Tensor],
    recorder: SimulatedRecorder | None = None,
    *,
    exact: bool = True,
    accumulate: int = 1,
    **options: Any,
) -> SimulatedRecorder:
    """Train a module eagerly and recorded; losses, gradients, parameters and buffers must agree after each step."""
    recorder = recorder or SimulatedRecorder()
    differential.check_training(
        module, loss, inputs, lambda one: compile_recorded(one, recorder, **options), exact=exact, accumulate=accumulate
    )
    return recorder
