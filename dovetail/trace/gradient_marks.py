"""Marks in a graph that a ``backward()`` inside of it is a part of: which nodes are the gradients that go into ``.grad``.

A gradient that leaves the graph has a descriptor. One that is added to ``.grad`` inside is a value like any other; where a pass
asks for it (``marks_gradients``), the trace puts a copy there that nothing else reads, and notes the input on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dovetail.trace.trace import Trace, TracedInput

#: In a node's ``meta``: it is a gradient of the input with this number, and read as such only.
GRADIENT_OF = "gradient_of"


@contextlib.contextmanager
def marked_gradients(trace: Trace, leaves: Sequence[TracedInput]) -> Iterator[None]:
    """While the engine runs: mark the gradients of these inputs, if a pass has asked for it."""
    if not trace.marks_gradients:
        yield
        return

    def marking(traced: TracedInput) -> torch.utils.hooks.RemovableHandle:
        def mark(gradient: torch.Tensor) -> torch.Tensor:
            copy = gradient.clone()
            trace.node_of(copy).meta[GRADIENT_OF] = traced.index
            return copy

        return traced.leaf.register_hook(mark)

    handles = [marking(traced) for traced in leaves if traced.leaf.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
