"""A graph that is expected to run once is not worth kernels of its own: its first run is by its operators as they are.

The first training step creates the optimizer's state, and what it assumed (that there is none) never holds again. Compiling
its kernels took 35 of the 67 seconds that a whole step of an MLP with 60 parameters needed for its first steps under Inductor.
Where the graph is run once more after all, the backend compiles it then.

>>> import torch
>>> from dovetail.backends import lookup_backend
>>> put_off(lookup_backend("inductor")).name
'inductor'
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail import torch_private_sizes as private_sizes
from dovetail.backends.aten import compile_aten
from dovetail.backends.outputs import guard_outputs, promised_strides
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, output_arguments


def compile_for_one_run(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    """The graph's operators as they are, with the strides that the graph promises.

    >>> class Double(torch.nn.Module):
    ...     def forward(self, x):
    ...         return [torch.ops.aten.mul.Tensor(x, 2)]
    >>> compile_for_one_run(torch.fx.symbolic_trace(Double()), [], kind="inference", options={})([torch.ones(2)])
    [tensor([2., 2.])]
    """
    outputs = output_arguments(graph)
    every = range(len(outputs))
    # What a decomposed operator returns may lie otherwise in memory than what the operator returns.
    visible = list(every if kind == "forward" else options.get("user_visible_outputs", every))
    return guard_outputs(compile_aten(graph, example_inputs, kind=kind), promised_strides(outputs, visible))


def put_off(backend: Backend) -> Backend:
    """The backend, which compiles a graph only when it is run for the second time.

    Graphs with symbolic sizes are compiled at once: the backend may assume more about these, and that must be known before
    the entry's guards are installed.
    """
    immediate = backend.compile

    def compile_later(
        graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
    ) -> CompiledCallable:
        values = [*example_inputs, *(node.meta.get("val") for node in graph.graph.nodes)]
        if any(map(private_sizes.has_symbols, values)):
            return immediate(graph, example_inputs, kind=kind, options=options)
        first: CompiledCallable | None = compile_for_one_run(graph, example_inputs, kind=kind, options=options)
        compiled: CompiledCallable | None = None
        lock = threading.Lock()

        def run(values: list[Any]) -> list[Any]:
            nonlocal first, compiled
            with lock:
                chosen, first = first or compiled, None
                if chosen is None:
                    with private.preserved_rng_state():
                        chosen = compiled = immediate(graph, example_inputs, kind=kind, options=options)
            return chosen(values)

        return run

    return replace(backend, compile=compile_later)
