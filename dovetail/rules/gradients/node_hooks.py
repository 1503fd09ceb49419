"""Hooks on autograd nodes, which no attribute of a tensor shows, and calls that wait for the backward's end.

A hook that the program registers on the node of what it computes runs when the backward is captured. No replay has it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.rules.gradients.kept_state import keeping_nothing
from dovetail.rules.refusals import refuse
from dovetail.torch_private import autograd_nodes as private_autograd_nodes

refuse(
    (private_autograd_nodes.queue_callback,),
    "queue_callback has a function called when the backward ends",
    "call it in a hook outside of the compiled function",
)


def _register(name: str, interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    node, *given = args
    given += kwargs.values()
    if private_autograd_nodes.is_leaf_node(node) or interpreter.values.source_of(node) is not None:
        raise Break(
            "a hook is registered on a node of autograd that outlives the call",
            "register it outside of the function",
        )
    interpreter.trace.recorder.refuse_replay("it registers a hook on a node of autograd")
    if len(given) == 1 and callable(given[0]):
        given = [keeping_nothing(interpreter, interpreter.trampoline(given[0]), given[0])]
    return interpreter.native(getattr(node, name), tuple(given), {}, hands_on=True)


for _name in ("register_hook", "register_prehook"):
    rule(*private_autograd_nodes.node_methods(_name))(functools.partial(_register, _name))


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
