"""Hooks and custom backwards that are not linear in their gradient, such as ``gradient.clamp(-1, 1)``.

Where a compiled backward is differentiated, the gradient of a value inside arrives in two summands: one by the forward's node, one
by that of the backward's derivative. Eager adds them up before a hook sees them. A linear function may be applied to each; every
other one is refused where both arrive, by a check in the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from dovetail.aot.nodes import GIVEN_TO, TAKES_WHOLE_GRADIENT, depending_on, needed_for
from dovetail.errors import HigherOrderGradientError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.runtime.derivatives import are_partial
from dovetail.torch_private import autograd_nodes as private_nodes
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import trees as private_trees
from dovetail.trace.trace import Trace
from dovetail.whole_calls.call import whole_call

_aten = torch.ops.aten
#: Linear in all tensors together.
_SUMS = frozenset(
    {
        *(_aten.cat, _aten.stack, _aten.neg, _aten.sum, _aten.mean, _aten.clone, _aten.copy),
        *(_aten._to_copy, _aten.expand, _aten.slice_backward, _aten.select_backward),
        *(_aten.constant_pad_nd, _aten.flip, _aten.roll, _aten.cumsum, _aten.tril, _aten.triu, _aten.repeat),
        *(_aten.slice_scatter, _aten.select_scatter, _aten.diagonal_scatter),
    }
)
#: Linear in each tensor, the others given.
_PRODUCTS = frozenset(
    {
        *(_aten.mul, _aten.mm, _aten.bmm, _aten.mv, _aten.dot, _aten.convolution, _aten.embedding_dense_backward),
        *(_aten.index, _aten.index_select, _aten.gather),
    }
)
#: Linear in the first tensor, the others given.
_QUOTIENTS = frozenset({_aten.div, _aten.convolution_backward})
#: Linear in all tensors but one, given that at this place.
_CHOICES = {_aten.where: 0, _aten.masked_fill: 1, _aten.index_put: 1, _aten.index_add: 2, _aten.scatter_add: 2}
_ZEROS = frozenset({_aten.zeros, _aten.zeros_like, _aten.new_zeros})

Backward = Callable[..., Any]


def refusing_summands(interpreter: TracingInterpreter, backward: Backward) -> Backward:
    """A hook, or a custom backward, that raises where it is given only a summand of its gradient and is not linear in that."""

    @functools.wraps(backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        trace = interpreter.trace
        if trace.phase != "backward":
            return backward(*args, **kwargs)
        count = len(trace.graph.nodes)
        result = backward(*args, **kwargs)
        tensors = [item for item in args if isinstance(item, torch.Tensor)]
        # Batched by vmap where it is the backward of the batched form that torch generates (generate_vmap_rule).
        inside = list(map(private_nodes.without_transforms, tensors))
        given = list(map(trace.node_of, inside))
        _note_given(trace, given)
        leaves, structure = private_trees.tree_flatten(result)
        results = [private_nodes.without_transforms(item) for item in leaves if isinstance(item, torch.Tensor)]
        if _is_linear(list(trace.graph.nodes)[count:], given, list(map(trace.node_of, results))):
            return result
        if any(one is not other for one, other in zip(tensors, inside, strict=True)):
            raise Break("the backward of a batched autograd.Function is not linear in its gradient", "define its vmap")
        with trace.recorder.paused(), private_calls.no_torch_function(), torch.no_grad():
            # A term without gradients is there only where the hook runs: a backward from other outputs must not have it.
            checked = [
                _checked(interpreter, item, tensors) if isinstance(item, torch.Tensor) else item for item in leaves
            ]
        return private_trees.tree_unflatten(checked, structure)

    return run


def _note_given(trace: Trace, given: Sequence[torch.fx.Node]) -> None:
    """Note at the incoming gradients of the graph which arguments of this backward come from them, read or not."""
    tangents = trace.graph.find_nodes(op="placeholder")[len(trace.inputs) :]
    if len(tangents) < 2 or len(given) < 2:
        return
    for place, node in enumerate(given):
        for tangent in needed_for([node]).intersection(tangents):
            tangent.meta.setdefault(GIVEN_TO, set()).add((len(trace.graph.nodes), place))


def _checked(interpreter: TracingInterpreter, gradient: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    def sizes(value: torch.Tensor, *_: torch.Tensor) -> list[torch.Tensor]:
        return [value]

    (found,) = whole_call(interpreter.trace, "the check of summands", _require_whole, [gradient, *given], sizes)
    interpreter.trace.node_of(found).meta[TAKES_WHOLE_GRADIENT] = True
    return found


def refusal_of_summands() -> HigherOrderGradientError:
    """The error of a backward that would be given a part of its gradient only."""
    return HigherOrderGradientError(
        "a hook or a custom backward inside a compiled function is not linear in its gradient, and a second derivative hands it"
        " the gradient in two parts",
        advice="take both derivatives inside the compiled function, or run this one eagerly",
    )


def _require_whole(gradient: torch.Tensor, *_: torch.Tensor) -> list[torch.Tensor]:
    if are_partial():
        raise refusal_of_summands()
    return [gradient.clone()]


def _is_linear(nodes: Sequence[Any], given: Iterable[Any], made: Iterable[Any]) -> bool:
    """Whether the results of these nodes are linear in the given gradients, as far as their operators say."""
    depends = depending_on(nodes, set(given))
    is_known = all(_is_linear_step(node, depends) for node in nodes if node in depends)
    return is_known and all(node in depends or _is_zero(node) for node in made)


def _packet(node: Any) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _is_zero(value: Any) -> bool:
    if not isinstance(value, torch.fx.Node):
        return type(value) in (int, float) and value == 0
    is_filled = _packet(value) in (_aten.full, _aten.full_like, _aten.scalar_tensor)
    return _packet(value) in _ZEROS or (is_filled and 0 in value.args)


def _is_linear_step(node: Any, depends: Collection[Any]) -> bool:
    packet, args = _packet(node), list(node.args)
    if packet is None or not isinstance(node.target, private_operators.OpOverload):
        return False
    tensors = _nodes_in(args)
    first = next(iter(node.target._schema.arguments), None)
    is_view = first is not None and first.alias_info is not None and not first.alias_info.is_write
    if is_view or _is_zero(node):
        return True
    if packet in (_aten.add, _aten.sub):
        return all(item in depends or _is_zero(item) for item in args[:2])
    if packet in _CHOICES:
        if any(item in depends for item in _nodes_in(args.pop(_CHOICES[packet]))):
            return False
        summands = args if packet in (_aten.where, _aten.masked_fill) else _nodes_in(args)
        return all(item in depends or _is_zero(item) for item in summands)
    if packet in _SUMS and all(item in depends or _is_zero(item) for item in tensors):
        return True
    is_single = sum(item in depends for item in tensors) == 1
    return is_single and (packet in _PRODUCTS or (packet in _QUOTIENTS and args[0] in depends))


def _nodes_in(value: Any) -> list[torch.fx.Node]:
    return [item for item in private_trees.tree_leaves(value) if isinstance(item, torch.fx.Node)]
