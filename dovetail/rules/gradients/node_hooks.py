"""Hooks on the autograd nodes of leaves, which no attribute of the tensor shows, and calls that wait for the backward's end."""

from __future__ import annotations

import torch

from dovetail.rules.refusals import refuse
from dovetail.torch_private import autograd_nodes as private_autograd_nodes

refuse(
    (private_autograd_nodes.queue_callback,),
    "queue_callback has a function called when the backward ends",
    "call it in a hook outside of the compiled function",
)


class LeafNodeHooks:
    """Whether the nodes at which gradients arrive have hooks.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> node = torch.autograd.graph.get_gradient_edge(weight).node
    >>> are_there = LeafNodeHooks()
    >>> are_there(weight)
    False
    >>> _ = node.register_hook(lambda results, gradients: None)
    >>> are_there(weight)
    True

    Each answer takes 3 us for each leaf, so it is asked again only where some hook was registered since, anywhere in Python.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, ...] = ()
        self._answer = False

    def __call__(self, *leaves: torch.Tensor) -> bool:
        """The answer for these leaves."""
        now = (private_autograd_nodes.hooks_registered(), *map(id, leaves))
        if now != self._asked or self._answer:
            self._answer = any(map(private_autograd_nodes.has_node_hooks, leaves))
            self._asked = now
        return self._answer
