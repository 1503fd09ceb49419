"""Which results of a captured function were computed from which others, by the autograd graph that was recorded in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.runtime.spec import FreshOutput, InputOutput, Mutation, OutputTensor, Tie, ViewOutput
from dovetail.trace import TracedInput

Edge = tuple[Any, int]


def find_ties(
    values: Sequence[torch.Tensor],
    differentiable: Sequence[bool],
    returned: Sequence[torch.Tensor],
    outputs: Sequence[OutputTensor],
    mutations: Sequence[Mutation],
    inputs: Sequence[TracedInput],
) -> tuple[Tie, ...]:
    """The ties between graph outputs (``values``) and what is handed out, in an order in which they can be made.

    Raises :class:`CaptureError` where there is no such order.
    """
    # For each edge of the autograd graph that is seen outside: what it is there, and which graph output it is made from.
    results: dict[Edge, tuple[int, int | None]] = {}
    written: dict[Edge, tuple[int, int | None]] = {}
    for mutation in mutations:
        value = inputs[mutation.input_index].value
        if mutation.differentiable and value.grad_fn is not None:
            written[value.grad_fn, value.output_nr] = (mutation.input_index, mutation.output_index)
    for position, (value, output) in enumerate(zip(returned, outputs, strict=True)):
        if value.requires_grad and value.grad_fn is not None and not isinstance(output, InputOutput):
            results.setdefault((value.grad_fn, value.output_nr), (position, _made_from(output, mutations)))
    if len(results) + len(written) == 0 or sum(differentiable) == 0:
        return ()
    ties: dict[int, Tie] = {}
    needs: dict[int, set[int]] = {}
    for index, (value, flag) in enumerate(zip(values, differentiable, strict=True)):
        if not flag:
            continue
        behind = _edges_behind(value.grad_fn)
        found = [item for edge, item in results.items() if edge in behind and item[1] != index]
        changed = [item for edge, item in written.items() if edge in behind and item[1] != index]
        if found or changed:
            ties[index] = Tie(index, tuple(position for position, _ in found), tuple(place for place, _ in changed))
            needs[index] = {source for _, source in (*found, *changed) if source is not None}
    return _in_order(ties, needs)


def _made_from(output: OutputTensor, mutations: Sequence[Mutation]) -> int | None:
    """The graph output that a result is made from, if any."""
    base = output.base if isinstance(output, ViewOutput) else output
    if isinstance(base, FreshOutput):
        return base.index
    return next((item.output_index for item in mutations if item.input_index == base.index), None)


def _edges_behind(root: Any) -> set[Edge]:
    """All edges that a gradient passes from a node on."""
    found: set[Edge] = set()
    seen = {root}
    stack = [root]
    while stack:
        for edge in stack.pop().next_functions:
            if edge[0] is not None:
                found.add(edge)
                if edge[0] not in seen:
                    seen.add(edge[0])
                    stack.append(edge[0])
    return found


def _in_order(ties: dict[int, Tie], needs: dict[int, set[int]]) -> tuple[Tie, ...]:
    ordered: list[Tie] = []
    waiting = dict(ties)
    while waiting:
        ready = [index for index in waiting if not any(need in waiting for need in needs[index])]
        if not ready:
            raise CaptureError(
                "results that are computed from each other are written to in place", advice="return clones of them"
            )
        ordered += [waiting.pop(index) for index in ready]
    return tuple(ordered)
