"""Backends written for ``torch.compile``: those registered with torch by name, and plain ``(graph, inputs)`` callables.

They compile Dovetail's forward and backward graphs one by one, as graphs for inference without autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.backends.aten import fresh
from dovetail.backends.common.outputs import guard_outputs, own_copy, promised_strides
from dovetail.backends.protocol import PIPELINE_OPTIONS, Backend, CompiledCallable, Kind, output_arguments
from dovetail.errors import OptionError
from dovetail.torch_private import dynamo as private_dynamo


def adapt_torch_backend(name: str, torch_backend: Callable[..., Any], description: str = "") -> Backend:
    """Return a :class:`Backend` around a callable ``(graph_module, example_inputs) -> callable(*inputs)``."""

    def compile_graph(
        graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
    ) -> CompiledCallable:
        given = options.keys() - PIPELINE_OPTIONS
        if given:
            raise OptionError(
                f"backend {name!r} comes from torch and takes no option {min(given)!r} here",
                advice="leave backend_options out",
            )
        outputs = output_arguments(graph)
        with torch.no_grad():
            compiled = torch_backend(own_copy(graph), list(example_inputs))
        if not callable(compiled):
            return compiled  # type: ignore[no-any-return]

        def call(inputs: list[Any]) -> list[Any]:
            values = list(inputs)
            inputs.clear()
            with torch.no_grad():
                # The first call of aot_eager was seen to return a new tensor where later ones return a view.
                return [fresh(value) for value in compiled(*values)]

        return guard_outputs(call, promised_strides(outputs, range(len(outputs))))

    return Backend(name, compile_graph, description=description or "a backend written for torch.compile")


def torch_registered_backend(name: str) -> Backend:
    """Return the backend that torch itself has registered under ``name``."""
    return adapt_torch_backend(name, private_dynamo.torch_backend(name), f"torch's own backend {name!r}")
