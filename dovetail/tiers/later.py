"""A backend that takes graphs and compiles them later: the callable of each is filled in when its kernels are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.backends import Backend
from dovetail.backends.common.outputs import own_copy
from dovetail.backends.inductor.float_inputs import floats_as_tensors
from dovetail.backends.protocol import CompiledCallable, Kind
from dovetail.torch_private import tracing as private_tracing


@dataclasses.dataclass(eq=False)
class LaterGraph:
    """One flat graph with what the backend is called with; ``run`` is there once it was compiled."""

    graph: torch.fx.GraphModule
    examples: Sequence[Any]
    kind: Kind
    options: Mapping[str, Any]
    run: CompiledCallable | None = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run it; the graph must have been compiled by now."""
        assert self.run is not None
        return self.run(inputs)

    def compile(self, backend: Backend) -> None:
        """Compile it now."""
        self.run = backend.compile(self.graph, list(self.examples), kind=self.kind, options=dict(self.options))


class Collector:
    """Stands for a backend while graphs are made for it: :attr:`backend` has the same facts, and puts off compiling.

    What it is given after :meth:`compile_all` is compiled at once: backwards for other patterns of tangents. ``asked`` is what the
    graphs of the next order are compiled by from then on.
    """

    def __init__(self, backend: Backend, asked: Any = None) -> None:
        self._real = backend
        self.asked = asked
        self.is_done = False
        self.graphs: list[LaterGraph] = []
        self.backend = dataclasses.replace(backend, compile=self)

    def __call__(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
    ) -> CompiledCallable:
        """See :class:`dovetail.backends.protocol.CompileFunction`."""
        if self.is_done:
            return self._real.compile(graph, example_inputs, kind=kind, options=options)
        if any(isinstance(node.meta.get("val"), torch.SymFloat) for node in graph.graph.nodes):
            # Another process cannot be told of a symbol.
            graph = own_copy(graph, private_tracing.lazy_graph_module)
            floats_as_tensors(graph)
        self.graphs.append(LaterGraph(graph, example_inputs, kind, options))
        return self.graphs[-1]

    def compile_all(self) -> None:
        """Compile all graphs so far; raises what the backend raises."""
        for item in self.graphs:
            item.compile(self._real)
        self.is_done = True
        self.graphs = []
