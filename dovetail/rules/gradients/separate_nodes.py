"""Independent outputs of one call, as nodes of autograd of their own.

A backward visits everything behind a node, whether a gradient arrives there or not, and frees it. In ``p, q = compiled(x * x, w)``
with ``q`` computed from ``w`` alone, ``q.backward()`` leaves eager's ``x * x`` alone. Through one node of autograd for the whole
call it would free it, and ``p.backward()`` would raise. So where outputs lead to different inputs that were computed from something
themselves, each group of outputs that lead to the same ones gets a node, with edges to these only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.runtime.derivatives import Gradients
from dovetail.runtime.function import Call, CompiledBackward, DifferentiableGraph, FlatCallable
from dovetail.runtime.output_dependencies import require_gradient
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import state as private_state
from dovetail.whole_calls.handles import detached

Groups = tuple[tuple[frozenset[int], tuple[int, ...]], ...]
"""For each node the inputs that it has no edge to, and its outputs."""


def inputs_behind(joint: JointGraph) -> dict[int, frozenset[int]]:
    """For each differentiable output the inputs that its gradient flows to."""
    outputs = [index for index, flag in enumerate(joint.spec.output_differentiable) if flag]
    behind: dict[torch.fx.Node, frozenset[int]] = dict(zip(joint.tangents, map(frozenset, zip(outputs)), strict=True))
    for node in joint.graph.nodes:
        if node not in behind:
            behind[node] = frozenset().union(*[behind[item] for item in node.all_input_nodes])
    found: dict[int, set[int]] = {index: set() for index in outputs}
    for number, gradient in enumerate(joint.gradients):
        for index in () if gradient is None else behind[gradient]:
            found[index].add(number)
    return {index: frozenset(numbers) for index, numbers in found.items()}


def with_separate_nodes(
    joint: JointGraph, freed_by: Sequence[frozenset[int]], graph: DifferentiableGraph
) -> FlatCallable:
    """The graph, with a node for each group of outputs where a call needs that.

    ``freed_by`` says for each differentiable output which ones a backward from it leaves without theirs.
    """
    reached = inputs_behind(joint)
    differ = sorted(frozenset().union(*reached.values()).difference(frozenset.intersection(*reached.values())))
    if not differ:
        return graph

    # An output that was computed from another one, or frees values that the other needs, shares its node.
    linked = [{item.output, *sources} for item, sources in graph.dependencies]
    linked += [
        {index, *(list(reached)[place] for place in freed)} for index, freed in zip(reached, freed_by, strict=True)
    ]

    @functools.lru_cache(maxsize=16)
    def groups_of(computed: frozenset[int]) -> Groups:
        together = {index: computed & numbers for index, numbers in reached.items()}
        for members in linked * len(linked):
            union = frozenset().union(*[together[index] for index in members])
            together.update(dict.fromkeys(members, union))
        groups: dict[frozenset[int], list[int]] = {}
        for index, numbers in together.items():
            groups.setdefault(computed - numbers, []).append(index)
        return tuple((cut_off, tuple(outputs)) for cut_off, outputs in groups.items())

    def run(inputs: list[Any]) -> list[Any]:
        groups = groups_of(frozenset([index for index in differ if inputs[index].grad_fn is not None]))
        if len(groups) == 1 or private_state.functorch_level() is not None:
            return graph(inputs)
        return graph(inputs, functools.partial(_apply, groups, joint.spec.output_differentiable))

    return run


class _Shared:
    """The state that the nodes of one call share: to the graph it is the context of the one node that it would have."""

    call: Call

    def set_materialize_grads(self, flag: bool) -> None:
        """Each node does so by itself."""

    def save_for_backward(self, *saved: torch.Tensor) -> None:
        """They are kept apart."""

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None:
        """These belong to no node."""


class _Seen:
    """A node's context as the graph sees it: with edges to the call's inputs only."""

    saved_tensors = ()

    def __init__(self, call: Call, next_functions: Sequence[tuple[Any, int]]) -> None:
        self.call, self.next_functions = call, next_functions

    def maybe_clear_saved_tensors(self) -> None:
        """Torch's own context lets go of ``saved_tensors``, of which there are none here."""


class NodeOfSomeOutputs(CompiledBackward):
    """The node of some of a call's outputs; with the rest of the protocol for compiled autograd."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: Call, flags: Sequence[bool], outputs: tuple[int, ...], *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The outputs again: ``given`` are these, then one tensor for each edge."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.flags, ctx.outputs = call, flags, outputs
        # The same memory and version counter, and no view for autograd.
        return tuple([detached(value) for value in given[: len(outputs)]])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the backward graph for these outputs."""
        if all(gradient is None for gradient in gradients):
            return (None,) * (3 + len(ctx.next_functions))
        seen = _Seen(ctx.call, ctx.next_functions[len(ctx.outputs) :])
        return _returned(ctx, ctx.call.graph.backward(seen, _of_all(ctx, gradients)))

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        return (ctx.call.graph.number, ctx.call.is_partial, *ctx.outputs)

    @staticmethod
    def prologue(ctx: Any, saved: Sequence[Any], gradients: Gradients) -> list[Any]:
        """The arguments of the backward's graph."""
        call, of_all = ctx.call, _of_all(ctx, gradients)
        defined = tuple([value is not None for value, flag in zip(of_all, ctx.flags, strict=True) if flag])
        found = call.apart.read(defined)
        if call.constants is not None:
            found = [value for value, entry in zip(found, call.constants, strict=True) if entry is None]
        return call.graph.prologue(call, found, of_all)  # type: ignore[no-any-return]

    @staticmethod
    def backward_graph(ctx: Any, gradients: Gradients) -> tuple[torch.fx.GraphModule, Sequence[int]] | None:
        """The graph for the gradients that there are, and which of the prologue's values it takes."""
        return ctx.call.graph.backward_graph(_of_all(ctx, gradients))  # type: ignore[no-any-return]

    @staticmethod
    def epilogue(ctx: Any, results: Sequence[Any]) -> list[Any]:
        """The graph's results in the order of this node's outputs."""
        return list(_returned(ctx, ctx.call.graph.to_edges(results)))


private_calls.hide_from_dynamo(NodeOfSomeOutputs.backward)


def _of_all(ctx: Any, gradients: Gradients) -> list[torch.Tensor | None]:
    """The gradients of all the call's outputs."""
    found: list[torch.Tensor | None] = [None] * len(ctx.flags)
    for index, gradient in zip(ctx.outputs, gradients, strict=True):
        found[index] = gradient
    return found


def _returned(ctx: Any, results: Sequence[Any]) -> tuple[Any, ...]:
    return (None, None, None, *[None] * len(ctx.outputs), *results)


def _apply(groups: Groups, flags: Sequence[bool], graph: DifferentiableGraph, *given: torch.Tensor) -> list[Any]:
    """The outputs, each group behind a node of its own."""
    shared = _Shared()
    with torch.no_grad():
        results = list(graph.forward(shared, given))
    apply: Callable[..., Any] = NodeOfSomeOutputs.apply
    for cut_off, outputs in groups:
        is_cut_off = graph.to_edges([index in cut_off for index in range(len(given))])
        edges = [value.detach() if flag else value for value, flag in zip(given, is_cut_off, strict=True)]
        made = apply(shared.call, flags, outputs, *[results[index] for index in outputs], *edges)
        for index, value in zip(outputs, made, strict=True):
            # An output that leads to no input was computed from a leaf that the program has made.
            results[index] = value if value.requires_grad else require_gradient(value)
    return results
