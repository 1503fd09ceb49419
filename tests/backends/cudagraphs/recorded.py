"""Helpers for the tests of the ``cudagraphs`` backend: programs run eagerly and recorded, and compared."""

from __future__ import annotations

import copy
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
    compiled = compile_recorded(function, recorder, **options)
    results: list[tuple[Any, Any]] = []
    for number, args in enumerate(calls):
        eager_args, compiled_args = differential.clone_inputs(args), differential.clone_inputs(args)
        torch.manual_seed(number)
        expected = function(*eager_args)
        state = torch.get_rng_state()
        torch.manual_seed(number)
        actual = compiled(*compiled_args)
        assert torch.equal(state, torch.get_rng_state()), "random state"
        results.append((expected, actual))
        differential.backward(expected)
        differential.backward(actual)
        for left, right in results:
            # Those of earlier calls too: a replay may not have changed what the caller has kept.
            differential.same(left, right, exact=exact)
        differential.same(list(eager_args), list(compiled_args), "argument", exact)
        for left, right in zip(
            differential.tensors_in(eager_args), differential.tensors_in(compiled_args), strict=True
        ):
            if left.is_leaf and left.grad is not None:
                differential.same_tensor(left.grad, right.grad, "gradient", exact)
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
    twin = copy.deepcopy(module)
    compiled = compile_recorded(loss, recorder, **options)
    eager = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    other = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, args in enumerate(inputs):
        torch.manual_seed(number)
        expected = loss(module, *args)
        state = torch.get_rng_state()
        torch.manual_seed(number)
        actual = compiled(twin, *args)
        assert torch.equal(state, torch.get_rng_state()), "random state"
        expected.backward()
        actual.backward()
        kept.append((expected.detach(), actual.detach()))
        for left, right in kept:
            differential.same_tensor(left, right, f"loss {number}", exact)
        for (name, left), right in zip(module.named_parameters(), twin.parameters(), strict=True):
            assert (left.grad is None) == (right.grad is None), name
            if left.grad is not None:
                differential.same_tensor(left.grad, right.grad, f"gradient of {name} at {number}", exact)
        if (number + 1) % accumulate == 0:
            eager.step()
            other.step()
            eager.zero_grad()
            other.zero_grad()
        for (name, left), right in zip(module.state_dict().items(), twin.state_dict().values(), strict=True):
            differential.same_tensor(left, right, f"{name} at {number}", exact)
    return recorder
