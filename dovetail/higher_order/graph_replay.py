"""A derivative of the next order of a program that cannot be replayed call by call: its operators are replayed instead.

A program that uses ``torch.func`` has no tape of calls, but the joint graph has its operators, those of the backward too. Autograd
differentiates them like calls, where the program let gradients flow through all of them: no block without gradients, no
``detach``, no formula of its own. Else the operators alone would have another derivative than the program.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.higher_order.backward import Request
from dovetail.runtime.derivatives import refusal
from dovetail.torch_private import calls as private_calls
from dovetail.trace.program import USES_FUNC
from dovetail.trace.repeats import draws_random_numbers

_PASSED_ON = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""The operators that autograd's own formulas apply to the values that they have saved."""
_KNOWS_ITS_STATISTICS = (torch.ops.aten.native_layer_norm_backward.default,)
"""Operators whose derivative counts in that the mean and the deviation that they are given depend on the input."""
_PLAIN = (operator.getitem,)
_CONSTANTS = frozenset(
    {
        *("zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    }
)


def is_replayed_by_operators(joint: JointGraph) -> bool:
    """Whether the operators of a program without a tape have its derivatives."""
    program = joint.program
    if program is None or USES_FUNC not in program.refusals[:1] or program.cuts or joint.order > 1:
        return False
    if joint.spec.mutations or joint.spec.metadata_changes:
        return False
    for node in joint.graph.nodes:
        if node.op == "call_function" and (
            (node.meta.get("phase") == "forward" and "without_gradients" in node.meta)
            or draws_random_numbers(node.target)
        ):
            return False
        # Of a call that is kept whole, and of a custom operator, autograd has no formulas of torch's.
        is_torchs = node.target in _PLAIN or getattr(node.target, "namespace", "") in ("aten", "prims")
        if node.op in ("get_attr", "call_module") or (node.op == "call_function" and not is_torchs):
            return False
    return True


def gradients_by_operators(
    joint: JointGraph, request: Request, sources: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The wanted gradients, as a function of inputs and tangents that autograd has seen."""
    given = iter(tangents)
    results = joint.results[: len(joint.spec.output_differentiable)]
    roots = [node for node, flag in zip(results, joint.spec.output_differentiable, strict=True) if flag]
    values: dict[torch.fx.Node, Any] = dict(zip(joint.primals, sources, strict=True))
    values |= {node: next(given) for node, flag in zip(joint.tangents, request.defined, strict=True) if flag}
    absent = {node: root for node, root in zip(joint.tangents, roots, strict=True) if node not in values}
    arrives = set(joint.tangents).difference(absent)
    smooth: set[Any] = set()

    def value_of(node: torch.fx.Node) -> Any:
        if node in absent and node not in values:
            values[node] = torch.zeros_like(values[absent[node]])  # type: ignore[index]
        return values[node]

    with private_calls.no_torch_function():
        for node in joint.graph.nodes:
            if node.op == "call_function":
                if arrives.intersection(node.all_input_nodes):
                    arrives.add(node)
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
                values[node] = args[0] if node.target in _PASSED_ON else node.target(*args, **kwargs)
                of_whole = node.args[0] if node.target is operator.getitem else node
                if of_whole is node and any(_requires_grad(value_of(item)) for item in node.all_input_nodes):
                    smooth.add(node)
                if of_whole in smooth and _is_cut_off(node, values[node]):
                    raise refusal(f"{node.all_input_nodes[0].target} gives its formula values that have no derivative")
    wanted = [joint.gradients[index] for index in request.wanted]
    return [value_of(node) if node is not None and node in arrives else None for node in wanted]


def _readers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    for user in node.users:
        if user.target in _PASSED_ON:
            yield from _readers(user)
        else:
            yield user


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_cut_off(node: torch.fx.Node, value: Any) -> bool:
    """Whether a result that was computed from what requires a gradient requires none, though it could, and is read."""
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return False
    if not value.is_floating_point() and not value.is_complex():
        return False
    if all(user.target in _KNOWS_ITS_STATISTICS for user in _readers(node)):
        return False
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "") not in _CONSTANTS
