"""Marks in a graph that a ``backward()`` inside of it is a part of: which nodes are the gradients that go into ``.grad``.

A gradient that leaves the graph has a descriptor. One that is added to ``.grad`` inside is a value like any other; where a pass
asks for it (``marks_gradients``), the trace puts a copy there that nothing else reads, and notes the input on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dovetail.trace.trace import Trace, TracedInput

#: In a node's ``meta``: it is a gradient of the input with this number, and read as such only.
GRADIENT_OF = "gradient_of"
#: In a marked node's ``meta``: what is to happen with it, if a module has asked for it (``Trace.replicas``).
EXCHANGE = "exchange"
#: Beside it: the name of the parameter in that module, by whatever way the function has come to it.
NAME = "exchanged_as"


@contextlib.contextmanager
def marked_gradients(trace: Trace, leaves: Sequence[TracedInput]) -> Iterator[None]:
    """While the engine runs: mark the gradients of these inputs, if a pass has asked for it."""
    if trace.replicas:
        gradients = [traced.leaf.grad for traced in leaves]
        before = [None if gradient is None else (gradient, trace.node_of(gradient)) for gradient in gradients]
        yield
        _mark_replicas(trace, leaves, before)
        return
    if not trace.settings.marks_gradients:
        yield
        return

    leaves = [traced for traced in leaves if traced.leaf.requires_grad]
    handles = [traced.leaf.register_hook(functools.partial(marked, trace, traced)) for traced in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def marked(trace: Trace, traced: TracedInput, gradient: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient that is marked as that of an input."""
    copy = gradient.clone()
    trace.node_of(copy).meta[GRADIENT_OF] = traced.index
    return copy


def _mark_replicas(
    trace: Trace, leaves: Sequence[TracedInput], before: Sequence[tuple[torch.Tensor, torch.fx.Node] | None]
) -> None:
    """Mark ``.grad`` as it is after the backward, with the gradient before it added: such a module exchanges that."""
    for traced, old in zip(leaves, before, strict=True):
        replica = next((item for item in trace.replicas if traced.real in item), None)
        gradient = traced.leaf.grad
        if replica is None or gradient is None or (old is not None and trace.node_of(gradient) is old[1]):
            continue
        with torch.no_grad():
            copy = marked(trace, traced, gradient)
            trace.node_of(copy).meta.update({EXCHANGE: replica, NAME: replica.names[id(traced.real)]})
            if old is not None and gradient is old[0]:
                # The engine has added to the tensor that was there, which others may hold.
                gradient.copy_(copy)
            else:
                traced.leaf.grad = copy
