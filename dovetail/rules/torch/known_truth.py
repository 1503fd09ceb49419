"""Branches of torch's own layers on the values of small inputs: the values are guarded, and the branch is known.

An example is ``torch.nn.TransformerEncoder``, which asks whether the mask it is given is causal.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.guards import SameElements
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Trace
from dovetail.trace.opaque import OPAQUE

_MOST_ELEMENTS = 64
_MOST_NODES = 100


def known_truth(values: Any, condition: torch.Tensor) -> bool | None:
    """The truth of a traced tensor without dimensions that depends on small inputs only, which are then guarded to hold the
    same values; None where it depends on anything else.

    Inputs that require a gradient are parameters or the like: they change at every call, and so would the guard.
    """
    trace: Trace = values.trace
    if condition.numel() != 1 or private_sizes.has_symbols(condition):
        return None
    inputs = {item.original_node: item for item in trace.inputs}
    order: list[torch.fx.Node] = []
    seen: set[torch.fx.Node] = set()
    stack = [(trace.node_of(condition), False)]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            order.append(node)
        elif node not in seen:
            if len(seen) == _MOST_NODES or not (is_small(inputs[node].real) if node in inputs else is_pure(node)):
                return None
            seen.add(node)
            stack.append((node, True))
            stack += [(given, False) for given in node.all_input_nodes]
    found: dict[torch.fx.Node, Any] = {}
    with private_tracing.disable_current_modes(), private_calls.no_torch_function(), torch.no_grad():
        for node in order:
            if node in inputs:
                found[node] = inputs[node].real.detach()
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
                assert callable(node.target)
                found[node] = node.target(*args, **kwargs)
        result = bool(found[order[-1]])
        known = [(item.index, SameElements.of(item.real)) for node, item in inputs.items() if node in seen]
    for index, same in known:
        values.guard(values.guards.tensor_source(index), same, "a branch depended on its values")
    return result


def is_small(real: Any) -> bool:
    """Whether this is a tensor on the CPU of few elements, and no parameter."""
    plain = type(real) is torch.Tensor and real.layout is torch.strided and real.device.type == "cpu"
    return plain and not real.requires_grad and real.numel() <= _MOST_ELEMENTS


def is_pure(node: torch.fx.Node, numbers: bool = False) -> bool:
    """Whether a node is an operator that gives the same for the same; ``numbers``: it may give a number."""
    if node.op != "call_function" or node.target is OPAQUE or not isinstance(node.target, private_operators.OpOverload):
        return False
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    is_number = isinstance(node.meta.get("val"), torch.SymInt) and not numbers
    return not random and not node.target._schema.is_mutable and not is_number
